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


def describe_classes(names: Sequence[str], confusion: np.ndarray, top5: np.ndarray) -> list[Row]:
    """Return a row for each class that has samples.

    ``confusion`` is [label, answer] and ``top5`` [label], in samples. ``top1``, ``top5`` and ``precision`` (correct
    answers of all such answers; empty where there is none) are fractions of 1.
    """
    rows = []
    for label in np.flatnonzero(confusion.sum(axis=1)).tolist():
        samples, correct, answers = confusion[label].sum(), confusion[label, label], confusion[:, label].sum()
        wrong = confusion[label].copy()
        wrong[label] = 0
        rows.append(
            {
                "label": label,
                "class": names[label],
                "samples": int(samples),
                "top1": round(float(correct / samples), 4),
                "top5": round(float(top5[label] / samples), 4),
                "precision": round(float(correct / answers), 4) if answers else "",
                "mistaken for": f"{names[wrong.argmax()]} ({wrong.max()})" if wrong.any() else "",
            }
        )
    return rows


def print_extremes(rows: Sequence[Row]) -> None:
    """Print the classes by top-1, the worst first; of many only the first and the last."""
    ordered = sorted(rows, key=lambda row: (row["top1"], row["class"]))
    if len(ordered) <= 2 * SHOWN:
        print(format_table(ordered))
        return
    print(f"the {SHOWN} worst of {len(ordered)} classes\n{format_table(ordered[:SHOWN])}\n")
    print(f"the {SHOWN} best\n{format_table(ordered[-SHOWN:])}\n")


def draw_confusion(names: Sequence[str], confusion: np.ndarray, path: Path) -> None:
    """Draw ``confusion`` [label, prediction] as shares of each class's images."""
    count = len(names)
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
