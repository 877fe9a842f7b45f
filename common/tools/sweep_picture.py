"""The picture of a sweep: the metric of its runs against a key."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from common.metrics.metrics_file import CHARTS
from common.metrics.plot import build_figure, place_legend, save_figure
from common.tools.report import RecordedRun
from common.tools.sweep_ranking import rank_combinations

MOST_NAMED = 10  # most lines of the picture that a legend names
MOST_TICKS = 6  # most values on its x axis with a tick each


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
