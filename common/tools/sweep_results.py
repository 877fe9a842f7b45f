"""The results of a sweep: a table, and a picture of the accuracy against the first key."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from common.errors import UserError, did_you_mean
from common.plot import build_figure, place_legend, save_figure
from common.tools.report import ABSENT, FinishedRun, load_run

SEED = "SEED"  # its values are repetitions, of which the picture shows the mean and the range
STYLES = ("-", "--", ":", "-.")
LONG = 12  # characters of a value, from which on it is rotated below the axis and alone in a row of the legend
LOG_FROM = 8  # greatest / least x from which on the axis is logarithmic
Line = tuple[tuple[str, Any], ...]  # (key, value) of what else the sweep varies
Point = tuple[Any, Line]


def read_sweep(folder: Path) -> list[FinishedRun]:
    """Read the runs in a sweep's folder, however far they are; raise `UserError` if there is none."""
    runs = [load_run(path.parent, path.parent.name) for path in folder.glob("*/config.json")]
    if not runs:
        raise UserError(f"--output {folder}: no run in it yet; start the sweep with --config and --grid")
    keys = _keys(runs)
    return sorted(runs, key=lambda run: [(str(type(value)), value) for value in (_value(run, key) for key in keys)])


def _keys(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the keys in the runs' names, ``KEY=VALUE,KEY=VALUE``."""
    parts = (part for run in runs for part in run.name.split(",") if "=" in part)
    return list(dict.fromkeys(part.partition("=")[0] for part in parts))


def _value(run: FinishedRun, key: str) -> int | float | str:
    """Return the value of a dotted key in the run's config, as text unless it is a number."""
    value: Any = run.about["config"]
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={str(each).removeprefix('AMP_TYPE.')}" for name, each in value.items())
    return value if isinstance(value, (int, float, str)) else str(value)


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


def tabulate(runs: Sequence[FinishedRun], failed: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return a row for each run; accuracies in per cent. ``failed``: exit statuses, by a run's name."""
    keys = _keys(runs)
    rows = []
    for run in runs:
        evaluations = run.of_kind("eval")
        top1 = [record["top1"] for record in evaluations]
        reached = dict.fromkeys(("top1", "best", "loss"), ABSENT)
        if top1:
            loss = f"{evaluations[-1]['loss']:.3f}"
            reached = {"top1": f"{top1[-1]:.2%}", "best": f"{max(top1):.2%}", "loss": loss}
        steps = run.steps + (f" (failed, exit status {failed[run.name]})" if run.name in failed else "")
        rows.append({key: _value(run, key) for key in keys} | reached | {"steps": steps})
    return rows


def draw(runs: Sequence[FinishedRun], path: Path, best: str | None = None) -> bool:
    """Draw top-1 of the finished runs against the first key, and of all against epochs; False if there is none yet.

    On the right the colour tells the first key's value; on both sides the style of a line tells the other keys. Runs
    that differ only in `SEED` are one point, their mean, with a bar from the least to the greatest. ``best`` names a
    key of whose values only the one with the highest mean is drawn, on both sides.
    """
    keys = _keys(runs)
    if best is not None and best not in keys[1:]:
        raise UserError(f"--best {best}: none of the keys beside the first{did_you_mean(best, keys)}")
    if not any(run.of_kind("eval") for run in runs):
        return False
    figure, (against_key, against_epoch) = build_figure(11, 4.5, columns=2)
    points = chosen_points(runs, best)
    if best is not None and points:
        runs = [run for chosen in points.values() for run in chosen]
    lines = list(dict.fromkeys(_line(run, keys, best) for run in runs))
    for number, line in enumerate(lines):
        tops = {x: [_top1(run) for run in chosen] for (x, of), chosen in points.items() if of == line}
        label = ", ".join(f"{key}={value}" for key, value in line)
        if tops:
            style = dict(label=label, color=f"C{number % 10}", linestyle=STYLES[number % len(STYLES)])
            _draw_line(against_key, tops, style)
    _draw_curves(against_epoch, runs, keys, [_line(run, keys, best) for run in runs])
    _label_axis(against_key, [x for x, _ in points], keys)
    if points and lines[0]:
        place_legend(against_key, columns=1 if len(lines[0]) > 1 else 2)
    save_figure(figure, path)
    return True


def chosen_points(runs: Sequence[FinishedRun], best: str | None) -> dict[Point, list[FinishedRun]]:
    """Return the finished runs at each point; there are several if seeds differ.

    Of the points that differ only in the key ``best`` only the one with the highest mean stays, without that key.
    """
    keys = _keys(runs)
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


def _draw_curves(axes: Any, runs: Sequence[FinishedRun], keys: Sequence[str], lines: Sequence[Line]) -> None:
    """Draw top-1 of ``runs`` against epochs; ``lines`` are their values of the other keys."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    values = [_value(run, keys[0]) if keys else run.name for run in runs]
    distinct, different = list(dict.fromkeys(values)), list(dict.fromkeys(lines))
    colors = dict(zip(distinct, colormaps["viridis"](np.linspace(0, 0.9, len(distinct))), strict=True))
    for run, value, line in zip(runs, values, lines, strict=True):
        curve = [(record["epoch"], 100 * record["top1"]) for record in run.of_kind("eval")]
        style = STYLES[different.index(line) % len(STYLES)]
        axes.plot(
            *zip(*curve, strict=True), color=colors[value], linestyle=style, marker="." if len(curve) == 1 else ""
        )
    for value, color in colors.items():  # one entry for all runs of a value, in a solid line
        axes.plot([], [], color=color, label=f"{keys[0]}={value}" if keys else value)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set(xlabel="epoch", ylabel="top-1 of each run, %")
    place_legend(axes, columns=1 if any(len(str(value)) > LONG for value in values) else 2)


def _draw_line(axes: Any, points: Mapping[Any, list[float]], style: Mapping[str, str]) -> None:
    places = sorted(points) if _is_numeric(points) else list(points)
    middles = [mean(points[x]) for x in places]
    below = [middle - min(points[x]) for x, middle in zip(places, middles, strict=True)]
    above = [max(points[x]) - middle for x, middle in zip(places, middles, strict=True)]
    xs = places if _is_numeric(points) else [str(x) for x in places]
    axes.plot(xs, middles, marker="o", **{**style, **({} if _is_numeric(points) else {"linestyle": ""})})
    if any([*below, *above]):
        axes.errorbar(xs, middles, [below, above], capsize=3, fmt="none", color=style["color"])


def _label_axis(axes: Any, places: Sequence[Any], keys: Sequence[str]) -> None:
    axes.set(xlabel=keys[0] if keys else "run", ylabel="top-1 of finished runs at the end, %")
    if places and _is_numeric(places):
        if min(places) > 0 and max(places) / min(places) >= LOG_FROM:
            axes.set_xscale("log")
        ticks = sorted(set(places))
        axes.set_xticks(ticks, [f"{x:,}" if isinstance(x, int) else f"{x:g}" for x in ticks])
        axes.minorticks_off()
    elif any(len(str(place)) > LONG for place in places):
        for label in axes.get_xticklabels():
            label.set(rotation=15, rotation_mode="anchor", horizontalalignment="right")


def _is_numeric(values: Any) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
