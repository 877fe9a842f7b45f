"""Figures as all pictures of the project have them, drawn with Matplotlib."""

import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def build_figure(width: float = 6.4, height: float = 4.0) -> tuple["Figure", Any]:
    """Return a figure of ``width`` x ``height`` inches, and its axes."""
    # Not pyplot, which keeps each figure in memory until it is closed.
    from matplotlib.figure import Figure  # takes half a second to import

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes


def wrap_text(figure: Any, text: str) -> str:
    """Break the text into lines that fit in the figure's width."""
    # Ten characters an inch: most are narrower at 10 points, capitals about as wide.
    return textwrap.fill(text, int(10 * figure.get_figwidth()))


def place_legend(axes: "Axes", columns: int = 1) -> None:
    """Put the legend below the axes, where it hides no data; entries in one column may be long."""
    figure: Any = axes.figure
    handles, labels = axes.get_legend_handles_labels()
    labels = [wrap_text(figure, label) for label in labels]
    # The figure grows by about the legend's height, so that the axes keep theirs.
    lines = "\n".join(labels).count("\n") + 1
    figure.set_figheight(figure.get_figheight() + 0.2 * lines / columns)
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, frameon=False)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write the figure to ``path``, as PNG or JPEG."""
    with warnings.catch_warnings(), replacing(path) as partial:
        # A character that the font lacks, in a class's name, is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(partial, dpi=150, pil_kwargs={"quality": 90})
