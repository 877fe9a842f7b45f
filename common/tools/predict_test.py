"""Predicting single images: equal to timm, whatever the file format."""

import io
import json
import re
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
    monkeypatch.setattr(predict, "BEST", 9)  # more than the 7 classes
    content = io.BytesIO((pictures / "a.png").read_bytes())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))
    with Image.open(pictures / "a.png") as picture:
        values, labels = timm_logits(run, [picture])[0].softmax(0).topk(7)
    predict.main([str(run), str(pictures), "-", "--json"])
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(answer["image"]).name[0] for answer in answers] == list("abcdef-")
    for answer in answers:
        for found, value, label in zip(answer["classes"], values, labels, strict=True):
            assert (found["label"], found["class"]) == (label, NAMES[label])
            assert found["probability"] == pytest.approx(value.item(), abs=2e-3)


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
    line = out.splitlines()[-1]
    assert re.fullmatch(rf"{names[3]}: (\S+ [\d.]+ %(; |$)){{5}}", line)
    unreadable = "not a readable image: "
    assert re.fullmatch(
        f"error: {names[0]}: {unreadable}not of a kind that is read\n"
        f"error: {names[1]}: {unreadable}.*\n"
        f"error: {names[2]}: No such file or directory\n",
        err,
    )
