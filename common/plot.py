"""Figures as all pictures of the project have them, drawn with Matplotlib."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.files import own_file

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


def place_legend(axes: "Axes", columns: int = 4) -> None:
    """Put the legend above the axes, where it hides no data."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, borderaxespad=0.2
    )


def save_figure(figure: "Figure", path: Path) -> None:
    """Write the figure to ``path``, as PNG or JPEG."""
    with warnings.catch_warnings():
        # A character that the font lacks, in a class's name, is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(own_file(path), dpi=150, pil_kwargs={"quality": 90})
