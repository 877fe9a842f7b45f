"""What the runs of a sweep's folder have reached: a table, and a picture of the accuracy against the first key."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from common.errors import UserError, did_you_mean
from common.tools.report import ABSENT, FinishedRun, load_run

SEED = "SEED"  # its values are repetitions, of which the picture shows the mean and the range
LOG_FROM = 8  # greatest / least x from which on the axis is logarithmic
Point = tuple[Any, tuple[tuple[str, Any], ...]]  # x, and (key, value) of what else the sweep varies


def read_sweep(folder: Path) -> list[FinishedRun]:
    """Read the runs in a sweep's folder, however far they are; raise `UserError` if there is none."""
    runs = [load_run(path.parent, path.parent.name) for path in folder.glob("*/config.json")]
    if not runs:
        raise UserError(f"--output {folder}: no run in it yet; start the sweep with --config and --grid")
    return sorted(runs, key=lambda run: [(str(type(value)), value) for value in combination(run).values()])


def combination(run: FinishedRun) -> dict[str, Any]:
    """Return the run's values of the keys in its name, ``KEY=VALUE,KEY=VALUE``."""
    keys = [part.partition("=")[0] for part in run.name.split(",") if "=" in part]
    return {key: _look_up(run.about["config"], key) for key in keys}


def is_finished(folder: Path, arguments: Sequence[str]) -> bool:
    """Return whether ``folder`` holds the whole run of ``arguments``; refuse it if its run had others."""
    if not (folder / "config.json").exists():
        return False
    run = load_run(folder, folder.name)
    then, now = (_settings(words) for words in (run.about["argv"][1:], arguments))
    if then != now:
        other = next(iter((then - now) or (now - then)))
        raise UserError(f"{folder} holds a run of other settings ({other}): choose another --output, or remove it")
    return _is_complete(run)


def _settings(arguments: Sequence[str]) -> set[str]:
    """Return what is trained: the config's name, and what ``--set`` says."""
    return {
        Path(value).stem if flag == "--config" else value
        for flag, value in itertools.pairwise(arguments)
        if flag in ("--config", "--set")
    }


def _is_complete(run: FinishedRun) -> bool:
    return any(record["step"] >= run.about["plan"]["last_step"] for record in run.of_kind("eval"))


def tabulate(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """Return a row for each run; accuracies in per cent."""
    keys = _keys(runs)
    rows = []
    for run in runs:
        evaluations = run.of_kind("eval")
        step, last = max((record["step"] for record in run.records), default=0), run.about["plan"]["last_step"]
        top1 = [record["top1"] for record in evaluations]
        rows.append(
            {key: combination(run).get(key, ABSENT) for key in keys}
            | {
                "top1": f"{top1[-1]:.2%}" if top1 else ABSENT,
                "best": f"{max(top1):.2%}" if top1 else ABSENT,
                "loss": f"{evaluations[-1]['loss']:.3f}" if top1 else ABSENT,
                "steps": f"{step:,}" if _is_complete(run) else f"{step:,} of {last:,}",
            }
        )
    return rows


def draw(runs: Sequence[FinishedRun], path: Path, best: str | None = None) -> bool:
    """Draw top-1 of the finished runs against the first key, and of all against epochs; False if there is none yet.

    Runs that differ only in `SEED` are one point, their mean, with a bar from the least to the greatest. ``best`` names
    a key of whose values only the one with the highest mean is drawn.
    """
    from matplotlib.figure import Figure

    keys = _keys(runs)
    if best is not None and best not in keys[1:]:
        raise UserError(f"--best {best}: none of the keys beside the first{did_you_mean(best, keys)}")
    if not any(run.of_kind("eval") for run in runs):
        return False
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    against_key, against_epoch = figure.subplots(1, 2)
    points = _choose(_collect(runs, keys), best)
    lines = list(dict.fromkeys(line for _, line in points))
    for number, line in enumerate(lines):
        _draw_line(against_key, {x: tops for (x, of), tops in points.items() if of == line}, _name(line), number)
    _label_axis(against_key, [x for x, _ in points], keys)
    for number, run in enumerate(runs):
        evaluations = run.of_kind("eval")
        curve = [record["epoch"] for record in evaluations], [100 * record["top1"] for record in evaluations]
        against_epoch.plot(*curve, color=f"C{number % 10}", label=run.name if len(runs) <= 8 else None)
    against_epoch.set(xlabel="epoch", ylabel="top-1, %", title="every run")
    for axes in (against_key, against_epoch):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    return True


def _collect(runs: Sequence[FinishedRun], keys: Sequence[str]) -> dict[Point, list[float]]:
    """Return the last top-1, in per cent, of each finished run, by the combination without `SEED`."""
    points: dict[Point, list[float]] = {}
    for run in filter(_is_complete, runs):
        values = combination(run)
        line = tuple((key, values[key]) for key in keys[1:] if key != SEED and key in values)
        points.setdefault((values.get(keys[0]) if keys else run.name, line), []).append(100 * _last_top1(run))
    return points


def _choose(points: Mapping[Point, list[float]], best: str | None) -> dict[Point, list[float]]:
    """Return, of the points that differ only in ``best``, the highest; that key is no longer in it."""
    chosen: dict[Point, list[float]] = {}
    for (x, line), tops in points.items():
        rest = x, tuple((key, value) for key, value in line if key != best)
        if rest not in chosen or mean(tops) > mean(chosen[rest]):
            chosen[rest] = tops
    return chosen


def _draw_line(axes: Any, points: Mapping[Any, list[float]], label: str, number: int) -> None:
    places = sorted(points) if _is_numeric(points) else list(points)
    middles = [mean(points[x]) for x in places]
    below = [middle - min(points[x]) for x, middle in zip(places, middles, strict=True)]
    above = [max(points[x]) - middle for x, middle in zip(places, middles, strict=True)]
    xs = places if _is_numeric(points) else [str(x) for x in places]
    axes.errorbar(xs, middles, [below, above], marker="o", capsize=3, label=label or None, color=f"C{number % 10}")


def _label_axis(axes: Any, places: Sequence[Any], keys: Sequence[str]) -> None:
    axes.set(xlabel=keys[0] if keys else "run", ylabel="top-1 at the end, %", title="finished runs")
    if places and _is_numeric(places):
        if min(places) > 0 and max(places) / min(places) >= LOG_FROM:
            axes.set_xscale("log")
        axes.set_xticks(
            sorted(set(places)), [f"{x:,}" if isinstance(x, int) else f"{x:g}" for x in sorted(set(places))]
        )
        axes.minorticks_off()


def _is_numeric(values: Any) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _last_top1(run: FinishedRun) -> float:
    return run.of_kind("eval")[-1]["top1"]


def _name(line: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(f"{key}={value}" for key, value in line)


def _keys(runs: Sequence[FinishedRun]) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in combination(run)))


def _look_up(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; values that are no numbers or text as JSON."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, (int, float, str)) else json.dumps(value)
