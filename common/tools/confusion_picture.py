"""The picture of an evaluation: which class is taken for which."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.metrics.plot import build_figure, save_figure
from common.text import shorten_names

NAMED_CLASSES = 50  # most classes whose names the picture shows
DRAWN_NAME = 40  # most letters of a name in it


def draw_confusion(names: Sequence[str], answers: np.ndarray, path: Path) -> None:
    """Draw which share of each class's images is taken for which class.

    ``answers``: as in `describe_classes`.
    """
    count = len(names)
    samples = np.bincount(answers[0], minlength=count)
    # Those without an answer (NaN) are no column, but count in the share.
    labels, best, _ = answers[:, answers[1] >= 0]
    confusion = np.bincount(labels * count + best, minlength=count**2).reshape(count, count)
    # A class without samples has a row of zeros.
    shares = confusion / np.maximum(samples, 1)[:, None]
    is_named = count <= NAMED_CLASSES
    short = shorten_names(names, DRAWN_NAME)
    shown = [short[name] for name in names]
    side = max(5.0, min(14.0, 0.35 * count))
    # inches of the longest name at 10 points
    room = 0.085 * max(map(len, shown)) if is_named else 0
    figure, axes = build_figure(side + room + 1.5, side + room)  # with the bar of colours
    axes.grid(False)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="share of the class's images")
    title = f"Confusion matrix, {samples.sum():,} images"
    label = "" if is_named else " (label in classes.csv)"
    axes.set(xlabel=f"predicted{label}", ylabel=f"true class{label}", title=title)
    if is_named:
        axes.set_xticks(range(count), shown, rotation=90, parse_math=False)  # "$" is no formula
        axes.set_yticks(range(count), shown, parse_math=False)
    save_figure(figure, path)
