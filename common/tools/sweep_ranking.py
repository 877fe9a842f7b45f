"""Which combination of a sweep is best: the tables and the picture of its runs."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.files import Values
from common.metrics.evaluation import Best, metric_value, rank_repetitions
from common.metrics.metrics_file import CHARTS
from common.metrics.plot import build_figure, place_legend, save_figure
from common.text import format_table, print_wrapped
from common.tools.report import ABSENT, RecordedRun, find_runs, load_readable
from common.tools.sweep_grid import SEED, parse_name, parse_number

WIDTH = 80  # most columns of a table
MOST_NAMED = 10  # most lines of the picture that a legend names
MOST_TICKS = 6  # most values on its x axis with a tick each
COSTS = (
    "first table: each run's best evaluation by BEST, as in checkpoints/best; GB: peak memory of a "
    "process; data: share of the time waiting for images; fwd, bwd: of a step; d(loss): largest "
    "difference of the train loss from the first run's"
)


def load_runs(output: Path) -> list[RecordedRun]:
    """Return the runs in a sweep's folder, in the order of their starts."""
    folders = find_runs(output)
    runs = load_readable(folders, [folder.name for folder in folders])
    return sorted(runs, key=lambda run: run.metadata["starts"][0]["started"])


def values_of(run: RecordedRun) -> dict[str, int | float | str]:
    """Return the values of a sweep's run, by the keys in its name, as its command has them."""
    # A name has no characters that shells treat specially.
    typed = {key: parse_number(value) for key, value in settings_of(run).items()}
    return {key: typed.get(key, value) for key, value in parse_name(run.name).items()}


def settings_of(run: RecordedRun) -> dict[str, str]:
    """Return what --set overrides in the run's command."""
    words = pairwise(run.metadata.get("argv", ()))
    return dict(text.split("=", 1) for flag, text in words if flag == "--set")


def other_keys(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the keys of --set, none of a grid, in which the commands of ``runs`` differ."""
    commands = []
    for run in runs:
        values = values_of(run)
        settings = settings_of(run).items()
        commands.append({key: value for key, value in settings if key not in values})
    keys = sorted({key for command in commands for key in command})
    return [key for key in keys if len({command.get(key) for command in commands}) > 1]


def group_by_data(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Return the runs of each data set, by its fingerprint: their figures do not compare.

    They are one group where --grid compares values of DATA.root.
    """
    if all("DATA.root" in values_of(run) for run in runs):
        return {"": list(runs)}
    groups = defaultdict(list)
    for run in runs:
        groups[run.metadata.get("data", {}).get("fingerprint", "")].append(run)
    return groups


def print_table(rows: Sequence[Values], values: Sequence[Values]) -> None:
    """Print a table of runs; where it is wider than 80 columns, their ``values`` as a list above.

    A row begins with its values.
    """
    table = format_table(rows)
    if len(table.partition("\n")[0]) > WIDTH:
        narrow = []
        for number, (row, of_row) in enumerate(zip(rows, values, strict=True), 1):
            print_wrapped(f"{number}: {describe_values(of_row)}")
            figures = {key: cell for key, cell in row.items() if key not in {*of_row, "run"}}
            narrow.append({"no.": number} | figures)
        table = format_table(narrow)
    print(table, flush=True)


def describe_values(values: Values) -> str:
    """Return the values as a command has them."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


class Ranked(NamedTuple):
    """A combination of a sweep's values."""

    rank: Best
    measured: list[float]  # the metric of the finished runs at their best, scaled as in `CHARTS`
    values: dict[str, Any]
    row: dict[str, Any]  # its row of the table


def rank_combinations(runs: Sequence[RecordedRun], notes: Mapping[str, str]) -> list[Ranked]:
    """Return the combinations of a sweep's values, the best first.

    Runs that differ only in `SEED` are one: the mean of the metric in the best evaluation of each,
    its range, and how many they are. ``notes``: what to add to its steps, by a run's name.
    """
    metric = runs[0].metric
    scale = CHARTS[metric].scale
    unit = "%" if scale == 100 else ""
    digits = 2 if unit else 3
    keys = dict.fromkeys(key for run in runs for key in values_of(run) if key != SEED)
    groups = defaultdict(list)
    for run in runs:
        known = values_of(run)
        # A run of another command may lack a key.
        groups[tuple((key, known.get(key, ABSENT)) for key in keys)].append(run)
    ranked = []
    for values, group in groups.items():
        bests = [run.best for run in group if run.final]
        measured = [scale * metric_value(best, metric) for best in bests]
        steps = dict.fromkeys(run.steps + notes.get(run.name, "") for run in group)
        shown_mean = shown_range = shown_loss = ABSENT
        if bests:
            mean = statistics.mean(measured)
            loss = statistics.mean(best["loss"] for best in bests)
            shown_mean = f"{mean:.{digits}f}{unit}"
            shown_range = f"{min(measured):.{digits}f}-{max(measured):.{digits}f}"
            shown_loss = f"{loss:.3f}"
        row = dict(values)
        row |= {metric: shown_mean, "range": shown_range, "n": len(bests), "loss": shown_loss}
        row["steps"] = ", ".join(steps)
        # A run that has diverged is never the best, whatever its NaNs were counted as.
        ranked.append(Ranked(rank_repetitions(bests, metric), measured, dict(values), row))
    return sorted(ranked, key=lambda entry: (len(entry.measured) > 0, entry.rank), reverse=True)


def print_ranked(ranked: Sequence[Ranked]) -> None:
    """Print the table of combinations."""
    print_table([entry.row for entry in ranked], [entry.values for entry in ranked])


def name_best(ranked: Sequence[Ranked]) -> str:
    """Return a line that names the best of several combinations and compares it to the second."""
    if len(ranked) < 2:
        return ""
    best, second, *_ = ranked
    if not second.measured or best.rank == Best():
        return ""
    if second.rank == Best():
        verdict = "the loss of the others is not finite"
    elif len(best.measured) == len(second.measured) == 1:
        verdict = f"no ranges: repeat it with --grid {SEED}=1,2,3"
    else:
        ranges = best.measured, second.measured
        overlap = max(map(min, ranges)) <= min(map(max, ranges))
        verdict = "ranges overlap" if overlap else "ranges do not overlap"
    return f"best: {describe_values(best.values)}; {verdict}"


def tabulate_costs(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return a row of costs for each run, which `COSTS` explains."""
    first = {record["step"]: record["loss"] for record in runs[0].of_kind("train")}
    rows = []
    for run in runs:
        differences = [
            abs(record["loss"] - first[record["step"]])
            for record in run.of_kind("train")
            if record["step"] in first
        ]
        row = {
            "run": ", ".join(map(str, values_of(run).values())),
            "GB": run.median("peak_memory_gb", "{:.2f}"),
            "img/s": run.median("samples_per_s", "{:,.0f}"),
            "data": run.median("data_wait", "{:.1f} %"),
            "fwd ms": run.median("forward_s", "{:.1f}"),
            "bwd ms": run.median("backward_s", "{:.1f}"),
            # NumPy's maximum is NaN if one value is.
            "d(loss)": f"{np.max(differences):.1e}" if differences else ABSENT,
        }
        rows.append(row)
    return rows


def draw(runs: Sequence[RecordedRun], path: Path, best: str | None = None) -> bool:
    """Draw the best metric of the finished runs against the first key; return False without any.

    The other keys give a line each, through the means of the runs that differ only in `SEED`. A bar
    goes from the least of them to the greatest. Draws of --random are points without a line.
    ``best`` names a key of whose values only the best one is drawn.
    """
    lines = defaultdict(dict)
    x_name = "run"
    for entry in rank_combinations(runs, {}):
        pairs = [pair for pair in entry.values.items() if pair[0] != best] or [("run", "best")]
        # The first key that varies is the x axis, the values of the others name the line.
        (x_name, x), *line = pairs
        if entry.measured:
            # Of those that differ only in the key ``best``, the best one comes first.
            lines[tuple(line)].setdefault(x, entry.measured)
    if not lines:
        return False
    figure, axes = build_figure(7, 4.5)
    ticks = list(dict.fromkeys(itertools.chain.from_iterable(lines.values())))
    is_numeric = not any(isinstance(x, str) for x in ticks)
    # A draw is known by its four digits: the record does not tell. Its neighbours differ in other
    # keys too, so that a line would say nothing.
    is_grid = is_numeric and len(ticks) <= MOST_TICKS
    is_grid = is_grid and not any(x % 1 and float(f"{x:.3g}") != x for x in ticks)
    for line, points in lines.items():
        # Numbers among texts are drawn as texts too.
        xs = sorted(points) if is_numeric else list(points)
        values = [points[x] for x in xs]
        places = xs if is_numeric else [*map(str, xs)]
        label = ", ".join(f"{key}={value}" for key, value in line)
        form = "o-" if is_grid else "o"
        (drawn,) = axes.plot(places, [*map(statistics.mean, values)], form, label=label)
        axes.vlines(places, [*map(min, values)], [*map(max, values)], drawn.get_color())
    title = CHARTS[runs[0].metric].title
    axes.set(xlabel=x_name, ylabel=f"{title}, best evaluation")
    if is_numeric:
        if min(ticks) > 0:
            axes.set_xscale("log")
        if is_grid:
            axes.set_xticks(ticks, map(str, ticks))
            axes.minorticks_off()
    if 1 < len(lines) <= MOST_NAMED:
        place_legend(axes)
    save_figure(figure, path)
    return True
