"""Accuracy, precision and confusions of each class."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.plot import build_figure, save_figure
from common.table import Row, format_table

SHOWN = 5  # classes at either end of the table for the terminal
NAMED = 50  # classes up to which the picture names them
LONG = 40  # characters of a name that the picture shows
COUNTED = 20  # classes up to which the picture writes its counts
DRAWN = 2000  # classes up to which there is a picture


def describe_classes(names: Sequence[str], answers: np.ndarray) -> list[Row]:
    """Return a row for each class that has samples.

    ``answers`` holds [label, answer, whether the label is among the first five answers] in its rows, by samples.
    ``top1``, ``top5`` and ``precision`` (correct answers of all such answers; empty where there is none) are fractions
    of 1.
    """
    labels, best, is_among_5 = answers
    is_wrong = labels != best
    samples, wrong, top5, answered, misleading = (
        np.bincount(of, minlength=len(names))
        for of in (labels, labels[is_wrong], labels[is_among_5 > 0], best, best[is_wrong])
    )
    mistakes: dict[int, tuple[int, int]] = {}  # by label: the most frequent wrong answer, and how often
    for (label, answer), count in zip(*np.unique(answers[:2, is_wrong].T, axis=0, return_counts=True), strict=True):
        if count > mistakes.get(label, (0, 0))[1]:
            mistakes[label] = answer, count
    return [
        {
            "label": label,
            "class": names[label],
            "samples": int(samples[label]),
            "top1": round(float(1 - wrong[label] / samples[label]), 4),
            "top5": round(float(top5[label] / samples[label]), 4),
            "precision": round(float(1 - misleading[label] / answered[label]), 4) if answered[label] else "",
            "mistaken for": f"{names[mistakes[label][0]]} ({mistakes[label][1]})" if wrong[label] else "",
        }
        for label in np.flatnonzero(samples).tolist()
    ]


def print_extremes(rows: Sequence[Row]) -> None:
    """Print the classes by top-1, the worst first; of many only the first and the last."""
    ordered = sorted(rows, key=lambda row: (row["top1"], row["class"]))
    if len(ordered) <= 2 * SHOWN:
        print(format_table(ordered))
        return
    print(f"the {SHOWN} worst of {len(ordered)} classes\n{format_table(ordered[:SHOWN])}\n")
    print(f"the {SHOWN} best\n{format_table(ordered[-SHOWN:])}\n")


def draw_confusion(names: Sequence[str], answers: np.ndarray, path: Path) -> bool:
    """Draw which shares of each class's images are taken for which; return False if there are more than `DRAWN`."""
    count = len(names)
    if count > DRAWN:
        return False
    confusion = np.bincount(answers[0] * count + answers[1], minlength=count**2).reshape(count, count)
    side = max(5.0, min(14.0, 0.35 * count))
    figure, axes = build_figure(side + 1.5, side)
    axes.grid(False)
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    figure.colorbar(axes.imshow(shares, cmap="Blues", vmin=0, vmax=1), label="share of the class's images")
    axes.set(xlabel="predicted", ylabel="true class", title=f"Confusion matrix, {confusion.sum():,} images")
    if count <= NAMED:
        shown = [name if len(name) <= LONG else f"{name[:LONG]}..." for name in names]
        axes.set_xticks(range(count), shown, rotation=90, parse_math=False)  # "$" is no formula
        axes.set_yticks(range(count), shown, parse_math=False)
    if count <= COUNTED:
        for label, predicted in zip(*np.nonzero(confusion), strict=True):
            shade = "white" if shares[label, predicted] > 0.5 else "black"
            text = dict(ha="center", va="center", color=shade, fontsize=8)
            axes.text(predicted, label, f"{confusion[label, predicted]}", **text)
    save_figure(figure, path)
    return True
