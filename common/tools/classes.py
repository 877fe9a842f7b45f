"""The classes of an evaluation: a row for each, and the picture of which is taken for which."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.metrics.plot import build_figure, save_figure
from common.text import format_table, shorten_names
from common.tools.calibration import coverage

SHOWN_CLASSES = 10  # those of the lowest recall, in the terminal
NAME_WIDTH = 17  # of a column of names there, so that the table has 80
NAMED_CLASSES = 50  # most classes whose names the picture shows
DRAWN_NAME = 40  # most letters of a name in it


def describe_classes(
    names: Sequence[str], answers: np.ndarray, confidences: np.ndarray
) -> list[dict[str, Any]]:
    """Return a row for each class that has samples.

    ``answers`` [3, samples] holds the label, the answer (-1 where it is NaN), and whether the label
    is among the first five answers; ``confidences`` [samples] are the answers' probabilities.
    ``recall``, ``top5``, ``precision`` (the share of such answers that are correct) and ``coverage
    at 95 %`` (the share of such answers, the most confident ones, of which 95 % are) are fractions
    of 1. The last two are empty where there are no such answers.
    """
    labels, best, is_among_5 = answers

    def by_class(classes: np.ndarray) -> np.ndarray:
        return np.bincount(classes, minlength=len(names))

    samples = by_class(labels)
    right = by_class(labels[labels == best])
    top5 = by_class(labels[is_among_5 > 0])
    answered = by_class(best[best >= 0])
    mistakes = _most_frequent_mistakes(names, answers[:2, labels != best])
    rows = []
    for label in np.flatnonzero(samples).tolist():
        precision = covered = ""
        if answered[label]:
            is_answer = best == label
            precision = f"{right[label] / answered[label]:.4f}"
            covered = f"{coverage(labels[is_answer] == label, confidences[is_answer]):.4f}"
        row = {
            "label": label,
            "class": names[label],
            "samples": int(samples[label]),
            "recall": f"{right[label] / samples[label]:.4f}",
            "top5": f"{top5[label] / samples[label]:.4f}",
            "precision": precision,
            "coverage at 95 %": covered,
            "mistaken for": mistakes.get(label, ""),
        }
        rows.append(row)
    return rows


def _most_frequent_mistakes(names: Sequence[str], wrong: np.ndarray) -> dict[int, str]:
    """Return by label its most frequent wrong answer, and how often, from [labels, answers]."""
    named = [*names, "NaN"]  # answer -1 is the last
    pairs, counts = np.unique(wrong, axis=1, return_counts=True)
    mistakes = {}
    for index in np.argsort(-counts, kind="stable"):
        label, answer = pairs[:, index]
        mistakes.setdefault(int(label), f"{named[answer]} ({counts[index]}x)")
    return mistakes


def print_lowest(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Print the classes with the lowest recall, in 80 columns; classes.csv has all."""
    # Texts of equal length: "0.9000" sorts as its number.
    lowest = sorted(rows, key=lambda row: (row["recall"], row["class"]))[:SHOWN_CLASSES]
    hidden = ("top5", "coverage at 95 %")  # for 80 columns
    shown = [{name: row[name] for name in row if name not in hidden} for row in lowest]
    shorten_classes(shown, names)
    title = f"the {len(shown)} of {len(rows)} classes with the lowest recall"
    if len(shown) == len(rows):
        title = f"all {len(rows)} classes, the lowest recall first"
    print(f"{title}\n{format_table(shown)}")


def shorten_classes(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Shorten the names of classes in ``rows`` to columns of `NAME_WIDTH`."""
    short = shorten_names(names, NAME_WIDTH)
    mistakes = [row["mistaken for"].rpartition(" (") for row in rows]
    room = max(len(end) for *_, end in mistakes) + 2  # for the number, "(12x)" after a space
    shorter = shorten_names(names, NAME_WIDTH - room)
    for row, (name, bracket, end) in zip(rows, mistakes, strict=True):
        row["class"] = short[row["class"]]
        row["mistaken for"] = shorter.get(name, name) + bracket + end


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
