"""The curves of a report: which metrics the runs hold, and points few enough to draw."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from common.metrics.curves import WHEN, Metrics

MAX_BUCKETS = 300  # of a long curve; each keeps its lowest and its highest point
Point = tuple[float, float | None]


@dataclass(frozen=True)
class Metric:
    """How a metric is shown: its title, the factor from file to page, and whether its axis starts at 0."""

    title: str
    scale: float = 1.0
    from_zero: bool = False


METRICS = {
    "loss": Metric("Loss"),
    "top1": Metric("Top-1 accuracy, %", 100),
    "top5": Metric("Top-5 accuracy, %", 100),
    "lr": Metric("Learning rate", from_zero=True),
    "grad_norm": Metric("Gradient norm before clipping", from_zero=True),
    "skipped": Metric("Updates skipped so far", from_zero=True),
    "samples_per_s": Metric("Images per second, all GPUs", from_zero=True),
    "mfu": Metric("Model FLOPs utilisation, %", 100, from_zero=True),
    "data_wait": Metric("Time waiting for data, %", 100, from_zero=True),
    "peak_memory_gb": Metric("Peak memory of a process, GB", from_zero=True),
}
NOT_SHOWN = {*WHEN, "samples"}  # the size of the evaluation set is constant


def collect_charts(runs: Sequence[Sequence[Metrics]]) -> list[dict[str, Any]]:
    """Return a chart for every metric in the runs' records, known ones first, with a line for each run and kind."""
    names = dict.fromkeys(METRICS) | {name: None for run in runs for record in run for name in record}
    charts = []
    for name in names:
        metric = METRICS.get(name, Metric(name.replace("_", " ")))
        lines = [line for number, run in enumerate(runs) for line in _collect_lines(run, number, name, metric.scale)]
        if lines and name not in NOT_SHOWN:
            charts.append({"name": name, "title": metric.title, "fromZero": metric.from_zero, "lines": lines})
    return charts


def _collect_lines(run: Sequence[Metrics], number: int, name: str, scale: float) -> list[dict[str, Any]]:
    curves: dict[str, list[Point]] = {}
    for record in run:
        if name in record:
            curves.setdefault(record["kind"], []).append((record["step"], _finite(record[name], scale)))
    lines = []
    for kind, points in curves.items():
        if any(value is not None for _, value in points):
            kept = thin_out(points, MAX_BUCKETS)
            lines.append({"run": number, "kind": kind, "x": [x for x, _ in kept], "y": [y for _, y in kept]})
    return lines


def _finite(value: Any, scale: float) -> float | None:
    """Return a number as it is shown, in six digits; None for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(f"{value * scale:.6g}")


def thin_out(points: list[Point], buckets: int) -> list[Point]:
    """Return the points, or where they are many, the first gap, the lowest and the highest of each of ``buckets``."""
    if len(points) <= 3 * buckets:
        return points
    kept = [points[0]]
    for bucket in range(buckets):
        part = points[bucket * len(points) // buckets : (bucket + 1) * len(points) // buckets]
        finite = sorted(((x, y) for x, y in part if y is not None), key=itemgetter(1))
        gap = [point for point in part if point[1] is None][:1]
        kept += sorted({*finite[:1], *finite[-1:], *gap}, key=lambda point: point[0])
    return [*kept, points[-1]]
