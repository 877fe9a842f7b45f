"""The style of every picture: 150 dpi, one colour per run or variant, legends above the data."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.files import own_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150


def build_figure(width: float = 6.4, height: float = 4.0, columns: int = 1) -> tuple["Figure", Any]:
    """Return a figure of ``width`` x ``height`` inches, and its axes: one, or an array of ``columns``."""
    from matplotlib.figure import Figure  # takes half a second to import

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns)
    for each in [axes] if columns == 1 else axes:
        each.grid(alpha=0.3)
        each.set_axisbelow(True)
    return figure, axes


def place_legend(axes: "Axes", columns: int = 4) -> None:
    """Put the legend above the axes, where it hides no data."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, borderaxespad=0.2)


def save_figure(figure: "Figure", path: Path, *, jpeg: bool = False) -> None:
    """Write the figure as PNG to ``path``, and as JPEG beside it if asked; it is drawn once."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # of a class's name, drawn as a box
        canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    picture.save(own_file(path.with_suffix(".png")), dpi=(DPI, DPI))
    if jpeg:
        picture.save(own_file(path.with_suffix(".jpeg")), dpi=(DPI, DPI), quality=90)
