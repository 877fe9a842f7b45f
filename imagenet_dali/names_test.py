"""Names of classes and files, from preparation to predictions: carried exactly, or refused."""

import json
import os
from pathlib import Path

import pytest

from common.errors import UserError
from common.testing.commands import Ended, run_forked
from common.tools import export, predict
from imagenet_dali import prepare, train_dali
from imagenet_dali.dataset import open_split
from imagenet_dali.testing import jpeg, write_config

CLASSES = ["Cat", "cat", "CON", "-x", "a b", " b ", "100 %s", "#1", "a,b;c|d=e", "$\\frac$", "'a' \"b\"", "<b>&amp;"]
CLASSES += ["*?", "=1+1", "é漢\u200d", "e\u0301", "\u00e9", "\u05e9\u05dc", "n" * 255]
FILES = [b"0.jpg", b"\xff.jpg", b"a\nb\x1b[2J.jpg", b"-x %s#'\".jpg"]


def test_names_are_carried_exactly_to_predictions(tmp_path: Path) -> None:
    def run(main: object, *words: object) -> Ended:
        ended = run_forked(main, words)  # pyright: ignore[reportArgumentType]
        assert ended.code == 0, ended.stderr
        assert "\x1b" not in ended.stdout + ended.stderr
        return ended

    place = tmp_path / 'it\'s "a" 100 %s #1 <b>é'
    images, data, output = place / "images", place / "data", place / "run"
    for split in ("train", "val"):
        for number, name in enumerate(CLASSES):
            (images / split / name).mkdir(parents=True)
            for file in FILES:
                (images / split / name / os.fsdecode(file)).write_bytes(jpeg(16, 16, seed=number))
    os.symlink("nowhere", images / "train/cat/link\n.jpg")
    run(prepare.main, images, data, "--workers=1", "--max-refused=0.02")
    assert open_split(data, "train").class_names == sorted(CLASSES)
    assert len(open_split(data, "train")) == len(FILES) * len(CLASSES)
    assert (data / "refused.txt").read_text() == "train/cat/link\\n.jpg\tNo such file or directory\n"

    settings = [f"DATA.root={data}", "DATA.workers=1", "MODEL.num_classes=None", "MAX_STEPS=1", "LOG.tensorboard=False"]
    words = [word for setting in settings for word in ("--set", setting)]
    run(train_dali.main, "--config", write_config(place), "--output", output, *words)
    run(export.main, output, "--to", "timm", "--output", place / "export")
    assert json.loads((place / "export" / "config.json").read_text())["label_names"] == sorted(CLASSES)
    for source in (output, place / "export"):
        answers = [
            json.loads(line) for line in run(predict.main, source, images / "val/cat", "--json").stdout.splitlines()
        ]
        assert {each["image"] for each in answers} == {str(images / "val/cat" / os.fsdecode(name)) for name in FILES}
        assert all(of["class"] == sorted(CLASSES)[of["label"]] for each in answers for of in each["classes"])


@pytest.mark.parametrize("name", [b"a\nb", b"\x1b[31mred", "a\u2028b".encode(), b"caf\xe9"])
def test_class_names_that_no_text_can_hold_are_refused(tmp_path: Path, name: bytes) -> None:
    for folder in ("good", os.fsdecode(name)):
        (tmp_path / "images" / folder).mkdir(parents=True)
        (tmp_path / "images" / folder / "0.jpg").write_bytes(jpeg())
    with pytest.raises(UserError, match=r"has a control character, a line separator or bytes"):
        prepare.main([str(tmp_path / "images"), str(tmp_path / "data")])
    assert not (tmp_path / "data").exists()
