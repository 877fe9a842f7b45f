"""The results of a sweep: accuracy, costs, and a picture of the accuracy against the first key."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from common.errors import UserError
from common.plot import build_figure, place_legend, save_figure
from common.tools.report import ABSENT, FinishedRun, load_run

CONFIG, SEED = "CONFIG", "SEED"  # SEED: its values are repetitions, of which the picture shows the mean and the range
COSTS = (
    "GB: peak memory of a process; data: share of the time waiting for images; fwd, bwd: of a step; d(loss): largest "
    "difference of the train loss from the first run's"
)
STYLES = ("-", "--", ":", "-.")
LONG = 12  # characters of a value, from which on it is alone in a row of the legend
LOG_FROM = 8  # greatest / least x from which on the axis is logarithmic
Line = tuple[tuple[str, Any], ...]  # (key, value) of what else the sweep varies
Point = tuple[Any, Line]


def read_sweep(folder: Path) -> list[FinishedRun]:
    """Read the runs in a sweep's folder, however far they are: numbers ascend, other values are in their first order.

    Raises `UserError` if there is none.
    """
    runs = [load_run(path.parent, path.parent.name) for path in folder.glob("*/config.json")]
    if not runs:
        raise UserError(f"--output {folder}: no run in it yet; start the sweep with --config and --grid")
    runs.sort(key=lambda run: run.starts[0]["started"] if run.starts else run.name)
    keys = keys_of(runs)
    seen = {key: list(dict.fromkeys(_value(run, key) for run in runs)) for key in keys}

    def position(run: FinishedRun, key: str) -> float:
        value = _value(run, key)
        return seen[key].index(value) if isinstance(value, str) else value

    return sorted(runs, key=lambda run: [position(run, key) for key in keys])


def keys_of(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the keys in the runs' names, ``KEY=VALUE,KEY=VALUE``."""
    parts = (part for run in runs for part in run.name.split(",") if "=" in part)
    return list(dict.fromkeys(part.partition("=")[0] for part in parts))


def _value(run: FinishedRun, key: str) -> int | float | str:
    """Return the value of a dotted key in the run's config, as text unless it is a number."""
    value: Any = run.about["config"] | {CONFIG: run.about["name"]}
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={str(each).removeprefix('AMP_TYPE.')}" for name, each in value.items())
    return value if isinstance(value, (int, float, str)) else str(value)


def is_finished(folder: Path, command: Sequence[str]) -> bool:
    """Return whether ``folder`` holds the whole run of ``command``; the run itself decides what else it resumes."""
    if not (folder / "config.json").exists():
        return False
    run = load_run(folder, folder.name)
    arguments = run.about["argv"][1:]
    return _is_complete(run) and list(command[-len(arguments) :]) == arguments


def _is_complete(run: FinishedRun) -> bool:
    return any(line["step"] >= run.about["plan"]["last_step"] for line in run.of_kind("eval"))


def tabulate(runs: Sequence[FinishedRun], failed: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return each run's values and accuracies in per cent. ``failed``: exit statuses, by a run's name."""
    keys, rows = keys_of(runs), []
    for run in runs:
        evaluations = run.of_kind("eval")
        reached = dict.fromkeys(("top1", "best", "loss"), ABSENT)
        if evaluations:
            last, best = evaluations[-1], max(line["top1"] for line in evaluations)
            reached = {"top1": f"{last['top1']:.2%}", "best": f"{best:.2%}", "loss": f"{last['loss']:.3f}"}
        steps = run.steps + (f" (failed, exit status {failed[run.name]})" if run.name in failed else "")
        rows.append({key: _value(run, key) for key in keys} | reached | {"steps": steps})
    return rows


def tabulate_costs(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """Return each run's memory, medians of rate and times, and the difference of its loss; `COSTS` explains them."""
    keys, first = keys_of(runs), {line["step"]: line["loss"] for line in runs[0].of_kind("train") if "loss" in line}
    rows = []
    for run in runs:
        pairs = [(line["loss"], first[line["step"]]) for line in run.of_kind("train") if line["step"] in first]
        rows.append(
            {
                "run": ", ".join(str(_value(run, key)) for key in keys) or run.name,
                "GB": run.median("peak_memory_gb", "{:.2f}"),
                "img/s": run.median("samples_per_s", "{:,.0f}"),
                "data": run.median("data_wait", "{:.1f} %"),
                "fwd ms": run.median("forward_s", "{:.1f}"),
                "bwd ms": run.median("backward_s", "{:.1f}"),
                "d(loss)": f"{max(abs(ours - theirs) for ours, theirs in pairs):.1e}" if pairs else ABSENT,
            }
        )
    return rows


def draw(runs: Sequence[FinishedRun], path: Path, best: str | None = None) -> bool:
    """Draw top-1 of the finished runs against the first key, and of all against epochs; False if there is none yet.

    On the right the colour tells the first key's value; on both sides the style of a line tells the other keys. Runs
    that differ only in `SEED` are one point, their mean, with a bar from the least to the greatest. ``best`` names a
    key of whose values only the one with the highest mean is drawn, on both sides.
    """
    if not any(run.of_kind("eval") for run in runs):
        return False
    keys = keys_of(runs)
    figure, (against_key, against_epoch) = build_figure(11, 4.5, columns=2)
    points = chosen_points(runs, best)
    if best is not None and points:
        runs = [run for chosen in points.values() for run in chosen]
    lines = list(dict.fromkeys(_line(run, keys, best) for run in runs))
    for number, line in enumerate(lines):
        tops = {x: [_top1(run) for run in chosen] for (x, of), chosen in points.items() if of == line}
        if tops:
            label = ", ".join(f"{key}={value}" for key, value in line)
            _draw_line(against_key, tops, f"C{number % 10}", STYLES[number % len(STYLES)], label)
    _draw_curves(against_epoch, runs, keys, {line: STYLES[n % len(STYLES)] for n, line in enumerate(lines)}, best)
    _label_axis(against_key, list(dict.fromkeys(x for x, _ in points)), keys)
    if points and lines[0]:
        place_legend(against_key, columns=1 if len(lines[0]) > 1 else 2)
    save_figure(figure, path)
    return True


def chosen_points(runs: Sequence[FinishedRun], best: str | None) -> dict[Point, list[FinishedRun]]:
    """Return the finished runs at each point; there are several if seeds differ.

    Of the points that differ only in the key ``best`` only the one with the highest mean stays, without that key.
    """
    keys = keys_of(runs)
    points: dict[Point, list[FinishedRun]] = {}
    for run in filter(_is_complete, runs):
        x = _value(run, keys[0]) if keys else run.name
        points.setdefault((x, _line(run, keys)), []).append(run)
    chosen: dict[Point, list[FinishedRun]] = {}
    for (x, line), same in points.items():
        rest = x, tuple((key, value) for key, value in line if key != best)
        if rest not in chosen or mean(map(_top1, same)) > mean(map(_top1, chosen[rest])):
            chosen[rest] = same
    return chosen


def _top1(run: FinishedRun) -> float:
    """Return the final top-1 in per cent."""
    return 100 * float(run.of_kind("eval")[-1]["top1"])


def _line(run: FinishedRun, keys: Sequence[str], best: str | None = None) -> Line:
    """Return the run's values of all keys but the first, `SEED` and ``best``."""
    return tuple((key, _value(run, key)) for key in keys[1:] if key not in (SEED, best))


def _draw_line(axes: Any, points: Mapping[Any, list[float]], color: str, style: str, label: str) -> None:
    is_numeric, middles = _is_numeric(points), [mean(same) for same in points.values()]
    xs = list(points) if is_numeric else list(map(str, points))
    axes.plot(xs, middles, marker="o", color=color, linestyle=style if is_numeric else "", label=label)
    if any(len(same) > 1 for same in points.values()):
        spans = [(mean(same) - min(same), max(same) - mean(same)) for same in points.values()]
        axes.errorbar(xs, middles, np.transpose(spans), capsize=3, fmt="none", color=color)


def _draw_curves(
    axes: Any, runs: Sequence[FinishedRun], keys: Sequence[str], styles: Mapping[Line, str], best: str | None
) -> None:
    """Draw top-1 of ``runs`` against epochs; ``styles`` are by the values of the other keys."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    values = [_value(run, keys[0]) if keys else run.name for run in runs]
    distinct = list(dict.fromkeys(values))
    colors = dict(zip(distinct, colormaps["viridis"](np.linspace(0, 0.9, len(distinct))), strict=True))
    for run, value in zip(runs, values, strict=True):
        curve = [(line["epoch"], 100 * line["top1"]) for line in run.of_kind("eval")]
        style = dict(color=colors[value], linestyle=styles[_line(run, keys, best)])
        axes.plot(*np.reshape(curve, (-1, 2)).T, marker="." if len(curve) == 1 else "", **style)
    for value, color in colors.items():  # one entry for all runs of a value, in a solid line
        axes.plot([], [], color=color, label=f"{keys[0]}={value}" if keys else value)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set(xlabel="epoch", ylabel="top-1 of each run, %")
    place_legend(axes, columns=1 if any(len(str(value)) > LONG for value in values) else 2)


def _label_axis(axes: Any, places: Sequence[Any], keys: Sequence[str]) -> None:
    axes.set(xlabel=keys[0] if keys else "run", ylabel="top-1 of finished runs at the end, %")
    if not _is_numeric(places):
        axes.tick_params(axis="x", rotation=15)
    elif places:
        if min(places) > 0 and max(places) / min(places) >= LOG_FROM:
            axes.set_xscale("log")
        axes.set_xticks(places, [f"{x:,}" if isinstance(x, int) else f"{x:g}" for x in places])
        axes.minorticks_off()


def _is_numeric(values: Any) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
