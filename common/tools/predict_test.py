"""Predicting single images: equal to timm, whatever the file format."""

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from common.testing.tiny_task import NAMES, timm_logits
from common.tools import predict

ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """The same picture in many kinds of files; two have to be turned."""
    folder = tmp_path_factory.mktemp("pictures")
    coarse = Image.fromarray(np.random.default_rng(1).integers(0, 256, (5, 6, 3), np.uint8))
    picture = coarse.resize((60, 44), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    picture.save(folder / "a.png")
    picture.convert("RGBA").save(folder / "b.webp", lossless=True)
    picture.save(folder / "c.bmp")
    picture.save(folder / "d.tiff")
    picture.transpose(Image.Transpose.ROTATE_90).save(folder / "e.png", exif=exif)
    (folder / "f_é.jpg").write_bytes((folder / "a.png").read_bytes())  # the kind is wrong
    return folder


def test_every_kind_of_image_gets_timms_answer(run, pictures, capsys, monkeypatch):
    monkeypatch.setattr(predict, "BEST", 9)  # of 7 classes
    content = io.BytesIO((pictures / "a.png").read_bytes())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))
    with Image.open(pictures / "a.png") as picture:
        values, labels = timm_logits(run, [picture])[0].softmax(0).topk(7)
    predict.main([str(run), str(pictures), "-", "--json"])
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(answer["image"]).name[0] for answer in answers] == list("abcdef-")
    for answer in answers:
        assert [found["label"] for found in answer["classes"]] == labels.tolist()
        assert [found["class"] for found in answer["classes"]] == [NAMES[label] for label in labels]
        assert [found["probability"] for found in answer["classes"]] == pytest.approx(
            values.tolist(), abs=2e-3
        )


def test_what_is_no_image_is_named_and_the_others_are_answered(
    run, pictures, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(predict, "BATCH", 2)
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "short.png").write_bytes((pictures / "a.png").read_bytes()[:2000])
    shutil.copy(pictures / "a.png", tmp_path / "z.png")
    names = [tmp_path / name for name in ("text.jpg", "short.png", "gone.png", "z.png")]
    with pytest.raises(SystemExit, match="^1$"):
        predict.main([str(run), *map(str, names)])
    out, err = capsys.readouterr()
    (_, line), errors = out.splitlines(), err.splitlines()
    assert line.count(" %") == 5
    assert line.startswith(f"{names[3]}: ")
    assert (
        sum(float(part.split()[-2]) for part in line.split("; ")) > 70
    )  # per cent: 5 of 7 classes
    assert errors[0] == f"error: {names[0]}: not a readable image: not of a kind that Pillow reads"
    assert errors[1].startswith(f"error: {names[1]}: not a readable image: ")
    assert errors[2:] == [f"error: {names[2]}: No such file or directory"]
