"""The results of a sweep: accuracy, costs, and a picture of the accuracy against the first key."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from common.errors import UserError
from common.plot import build_figure, place_legend, save_figure
from common.tools.report import ABSENT, FinishedRun, load_run

CONFIG, SEED = "CONFIG", "SEED"  # SEED: its values are repetitions, of which the picture shows the mean and the range
COSTS = (
    "GB: peak memory of a process; data: share of the time waiting for images; fwd, bwd: of a step; d(loss): largest "
    "difference of the train loss from the first run's"
)
LOG_FROM = 8  # greatest / least x from which on the axis is logarithmic
Line = tuple[tuple[str, Any], ...]  # (key, value) of what else the sweep varies


def read_sweep(folder: Path) -> list[FinishedRun]:
    """Read the runs in a sweep's folder, however far they are: numbers ascend, other values are in their first order.

    Raises `UserError` if there is none.
    """
    runs = [load_run(path.parent, path.parent.name) for path in folder.glob("*/config.json")]
    if not runs:
        raise UserError(f"--output {folder}: no run in it yet; start the sweep with --config and --grid")
    runs.sort(key=lambda run: run.about["starts"][0]["started"])
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
    """Return each run's medians of memory, rate and times, and the difference of its loss; `COSTS` explains them."""
    first, rows = {line["step"]: line["loss"] for line in runs[0].of_kind("train")}, []
    for run in runs:
        train = run.of_kind("train")
        differences = [abs(line["loss"] - first[line["step"]]) for line in train if line["step"] in first]
        costs = {
            "run": ", ".join(str(_value(run, key)) for key in keys_of(runs)) or run.name,
            "GB": run.median("peak_memory_gb", "{:.2f}"),
            "img/s": run.median("samples_per_s", "{:,.0f}"),
            "data": run.median("data_wait", "{:.1f} %"),
            "fwd ms": run.median("forward_s", "{:.1f}"),
            "bwd ms": run.median("backward_s", "{:.1f}"),
            "d(loss)": f"{max(differences):.1e}" if differences else ABSENT,
        }
        rows.append(costs)
    return rows


def draw(runs: Sequence[FinishedRun], path: Path, best: str | None = None) -> bool:
    """Draw top-1 of the finished runs against the first key, with a line for the others; False if there is none yet.

    Runs that differ only in `SEED` are one point, their mean, with a bar from the least to the greatest. ``best`` names
    a key of whose values only the one with the highest mean is drawn.
    """
    lines, keys = collect_points(runs, best), keys_of(runs)
    if not lines:
        return False
    figure, axes = build_figure(7, 4.5)
    places = list(dict.fromkeys(x for points in lines.values() for x in points))
    is_numeric = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in places)
    for number, (line, points) in enumerate(lines.items()):
        xs, middles = list(points) if is_numeric else list(map(str, points)), list(map(mean, points.values()))
        label = ", ".join(f"{key}={value}" for key, value in line)
        axes.plot(xs, middles, "o-" if is_numeric else "o", color=f"C{number}", label=label)
        bars = [(mean(tops) - min(tops), max(tops) - mean(tops)) for tops in points.values()]
        axes.errorbar(xs, middles, list(zip(*bars, strict=True)), capsize=3, fmt="none", color=f"C{number}")
    axes.set(xlabel=keys[0] if keys else "run", ylabel="top-1 of finished runs at the end, %")
    if is_numeric:
        if min(places) > 0 and max(places) / min(places) >= LOG_FROM:
            axes.set_xscale("log")
        axes.set_xticks(places, [f"{x:,}" if isinstance(x, int) else f"{x:g}" for x in places])
        axes.minorticks_off()
    if any(lines):
        place_legend(axes, columns=2)
    save_figure(figure, path)
    return True


def collect_points(runs: Sequence[FinishedRun], best: str | None) -> dict[Line, dict[Any, list[float]]]:
    """Return the final top-1 of the finished runs in per cent, by line and x; there are several if seeds differ.

    Of the points that differ only in the key ``best`` only the one with the highest mean stays, without that key.
    """
    keys, points = keys_of(runs), {}
    for run in filter(_is_complete, runs):
        values = {key: _value(run, key) for key in keys if key != SEED} or {"": run.name}
        points.setdefault(tuple(values.items()), []).append(100 * run.of_kind("eval")[-1]["top1"])
    lines: dict[Line, dict[Any, list[float]]] = {}
    for ((_, x), *line), tops in points.items():
        chosen = lines.setdefault(tuple(part for part in line if part[0] != best), {})
        if x not in chosen or mean(tops) > mean(chosen[x]):
            chosen[x] = tops
    return lines
