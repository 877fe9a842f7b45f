"""The table of an evaluation: a row for each class."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from common.text import format_table, shorten_names

SHOWN_CLASSES = 10  # those of the lowest recall, in the terminal
NAME_WIDTH = 17  # of a column of names there, so that the table has 80


def describe_classes(names: Sequence[str], answers: np.ndarray) -> list[dict[str, Any]]:
    """Return a row for each class that has samples.

    ``answers`` [3, samples] holds the label, the answer (-1 where it is NaN), and whether the label
    is among the first five answers. ``recall``, ``top5`` and ``precision`` (the share of such
    answers that are correct; empty where there are none) are fractions of 1.
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
        # Empty where the class is never answered: 0 / 0.
        precision = f"{right[label] / answered[label]:.4f}" if answered[label] else ""
        row = {
            "label": label,
            "class": names[label],
            "samples": int(samples[label]),
            "recall": f"{right[label] / samples[label]:.4f}",
            "top5": f"{top5[label] / samples[label]:.4f}",
            "precision": precision,
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
        mistakes.setdefault(int(label), f"{named[answer]} ({counts[index]})")
    return mistakes


def print_lowest(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Print the classes with the lowest recall, in 80 columns; classes.csv has all."""
    # Texts of equal length: "0.9000" sorts as its number.
    lowest = sorted(rows, key=lambda row: (row["recall"], row["class"]))[:SHOWN_CLASSES]
    shown = [{name: row[name] for name in row if name != "top5"} for row in lowest]
    shorten_classes(shown, names)
    print(f"the {len(shown)} of {len(rows)} classes with the lowest recall\n{format_table(shown)}")


def shorten_classes(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Shorten the names of classes in ``rows`` to columns of `NAME_WIDTH`."""
    short = shorten_names(names, NAME_WIDTH)
    mistakes = [row["mistaken for"].rpartition(" (") for row in rows]
    room = max(len(end) for *_, end in mistakes) + 2  # for the number, "(12)" after a space
    shorter = shorten_names(names, NAME_WIDTH - room)
    for row, (name, bracket, end) in zip(rows, mistakes, strict=True):
        row["class"] = short[row["class"]]
        row["mistaken for"] = shorter.get(name, name) + bracket + end
