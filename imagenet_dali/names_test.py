"""Names of classes and files, from preparation to an export and back: carried exactly, or refused."""

import csv
import html
import json
import os
from pathlib import Path

import pytest

from common.errors import UserError
from common.testing.commands import Ended, run_forked
from common.tools import evaluate, export, predict, report
from imagenet_dali import train_dali
from imagenet_dali.dataset import open_split
from imagenet_dali.prepare import main
from imagenet_dali.testing import jpeg, write_config

CLASSES = [
    *("Cat", "cat", "CON", "nul", "None", "-x", "--help", "labels.txt", "a b", " b ", "100 %s", "#1", "a,b;c|d=e"),
    *("$(touch x)", "$\\frac$", "{x}", "'a' \"b\"", "<b>&amp;", "a\\nb", "=1+1", "~", "*?", "é漢\u200d"),
    *("e\u0301", "\u00e9", "\u05e9\u05dc\u05d5\u05dd", "👩\u200d🔬", "n" * 255, "é" * 127),
]
FILES = [b"0.jpg", b"\xff.jpg", b"a\nb\x1b[2J.jpg", "\u2028.jpg".encode(), b"-x %s#'\".jpg", b"n" * 251 + b".jpg"]
PLACE = 'it\'s "a" 100 %s #1 <b>é'  # the folder of everything


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of classes and files with odd names, in a folder with an odd name."""
    place = tmp_path_factory.mktemp("names") / PLACE
    for split in (b"train", b"val"):
        for number, name in enumerate(CLASSES):
            folder = os.fsencode(place / "images") + b"/" + split + b"/" + os.fsencode(name)
            os.makedirs(folder)
            for file in FILES if split == b"train" else FILES[:2]:
                Path(os.fsdecode(folder + b"/" + file)).write_bytes(jpeg(16, 16, seed=number))
    os.symlink("nowhere", place / "images/train/cat/link\n.jpg")
    os.symlink(".", place / "images/train/cat/loop")
    return place


def run(*words: object) -> Ended:
    """Run a command, which must succeed and print nothing that a terminal would obey."""
    main, *argv = words
    ended = run_forked(main, argv)  # pyright: ignore[reportArgumentType]
    assert ended.code == 0, ended.stderr
    assert "\x1b" not in ended.stdout + ended.stderr
    return ended


def test_names_are_carried_exactly_to_the_export_and_back(place: Path) -> None:
    data, output, images = place / "data", place / "run", place / "images"
    run(main, images, data, "--workers=1", "--max-refused=2%")
    assert open_split(data, "train").class_names == sorted(CLASSES)
    assert len(open_split(data, "train")) == len(FILES) * len(CLASSES)
    assert (data / "refused.txt").read_text() == "train/cat/link\\n.jpg\ta link to nothing\n"

    settings = [
        f"DATA.root={data}",
        "DATA.workers=1",
        "MODEL.num_classes=None",
        "MAX_STEPS=1",
        "LOG.tensorboard=False",
        "fp16=None",
    ]
    words = ["--config", write_config(place), *(word for setting in settings for word in ("--set", setting))]
    run(train_dali.main, *words, "--output", output)
    ended = run(evaluate.main, output)
    rows = list(csv.DictReader(next(output.glob("evaluation/*/classes.csv")).read_text().splitlines()))
    assert [row["class"] for row in rows] == sorted(CLASSES)
    assert {row["mistaken for"].rpartition(" (")[0] for row in rows} <= {*CLASSES, ""}
    assert ended.stderr == ""

    run(export.main, output, "--to", "timm", "--output", place / "export")
    assert json.loads((place / "export" / "config.json").read_text())["label_names"] == sorted(CLASSES)
    run(train_dali.main, *words, "--output", place / "again", "--init", place / "export")
    files = {os.path.join(images, "val/cat", os.fsdecode(name)) for name in FILES[:2]}
    for source in (output, place / "export", place / "again"):
        answers = [
            json.loads(line) for line in run(predict.main, source, images / "val/cat", "--json").stdout.splitlines()
        ]
        assert {answer["image"] for answer in answers} == files
        assert all(
            found["class"] == sorted(CLASSES)[found["label"]] for answer in answers for found in answer["classes"]
        )
    run(predict.main, output, images / "val/cat")
    run(report.main, output, "--output", place / "report.html")
    assert str(data) in html.unescape((place / "report.html").read_text())


@pytest.mark.parametrize("name", [b"a\nb", b"\x1b[31mred", "a\u2028b".encode(), b"caf\xe9"])
def test_class_names_that_no_text_can_hold_are_refused(tmp_path, name):
    for folder in (b"good", name):
        path = Path(os.fsdecode(os.fsencode(tmp_path / "images") + b"/" + folder))
        path.mkdir(parents=True)
        (path / "0.jpg").write_bytes(jpeg())
    with pytest.raises(UserError, match=r"has a control character, a line separator or bytes"):
        main([str(tmp_path / "images"), str(tmp_path / "data")])
    assert not (tmp_path / "data").exists()
