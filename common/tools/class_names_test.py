"""Names of classes at the lengths that people have, in the terminal's table and in the picture."""

import re
import shutil
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from common.testing.tiny_task import train
from common.text import format_table, shorten_names
from common.tools import classes, evaluate

LEAF = "a leaf of the tomato plant in stage {} of late blight, from above"
STAGES = [LEAF.format(stage) for stage in range(7)]
SHARKS = [
    "great white shark, white shark, man-eater, man-eating shark, Carcharodon carcharias",
    "black-and-tan coonhound, a hound of the American South, of medium to large size, scent hound",
    "$x^$",  # no formula
    "crane",
    "maillot, tank suit",
    "hen-of-the-woods, hen of the woods, Polyporus frondosus, Grifola frondosa",
    "African grey",
]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The pictures that are written; a name that finds no room is a warning, here an error."""
    drawn = []
    save = classes.save_figure

    def keep(figure: Figure, path: Path) -> None:
        save(figure, path)
        drawn.append(figure)

    monkeypatch.setattr(classes, "save_figure", keep)
    return drawn


@pytest.mark.parametrize("names", [STAGES, SHARKS])
def test_long_names_differ_and_have_room(data, names, tmp_path, capsys, figures):
    images = shutil.copytree(data, tmp_path / "data")
    for split in ("train", "test"):
        for folder, name in zip(sorted((images / split).iterdir()), names, strict=True):
            folder.rename(folder.with_name(name))
    run = train(images, tmp_path / "run")
    capsys.readouterr()
    evaluate.main([str(run)])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert max(map(len, rows)) <= 80
    of_label = dict(re.findall(r"^\| +(\d+) \| *(.*?) *\|", "\n".join(rows), re.MULTILINE))
    assert len(set(of_label.values())) == len(set(names))
    ((axes, _),) = (figure.axes for figure in figures)
    axes.figure.draw_without_rendering()  # at its own resolution
    whole = axes.figure.bbox
    texts = [*axes.get_xticklabels(), *axes.get_yticklabels()]
    assert len({text.get_text() for text in texts}) == len(set(names))
    for text in texts:
        box = text.get_window_extent()
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1


def test_text_stands_left_in_a_table_and_numbers_right():
    rows = [
        {"mode": "data parallel", "step ms": "*2,050-2,057", "top1": "0.4", "by": "Wilson"},
        {"mode": "1d 2", "step ms": "does not fit", "top1": "-1.25e-3 to 1", "by": ""},
    ]
    assert format_table(rows).splitlines() == [
        "| mode          |      step ms |          top1 | by     |",
        "| ------------- | -----------: | ------------: | ------ |",
        "| data parallel | *2,050-2,057 |           0.4 | Wilson |",
        "| 1d 2          | does not fit | -1.25e-3 to 1 |        |",
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["short", "just as long"], ["short", "just as long"]),
        (["a longer name", "short"], ["a lo..r name", "short"]),
        (["same start 1 same end", "same start 2 same end"], ["sam..1 same ", "sam..2 same "]),
        # which differ in two places, too far from each other
        (
            [f"start {a} and much more {b} same end" for a in (1, 2) for b in (1, 2)],
            ["sta..1 and m", "sta..1 a..#1", "sta..2 and m", "sta..2 a..#3"],
        ),
    ],
)
def test_shortened_names(names, expected):
    assert [*shorten_names(names, 12).values()] == expected
