"""Predicting single images: equal to timm, whatever the file format."""

import io
import json
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from pyarrow.parquet import read_table

from common.checkpoint.saved_run import SavedRun, open_run
from common.engine.predictor import Predictor
from common.errors import PartialError, UserError
from common.files import ROOT
from common.testing.photographs import noise_image
from common.testing.tiny_task import NAMES, timm_logits
from common.tools import predict

ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """The same picture in many kinds of files; two have to be turned."""
    folder = tmp_path_factory.mktemp("pictures")
    picture = noise_image(5, 6, seed=1).resize((60, 44), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    picture.save(folder / "a.png")
    picture.convert("RGBA").save(folder / "b.webp", lossless=True)
    picture.save(folder / "c.bmp")
    picture.save(folder / "d.tiff")
    picture.transpose(Image.Transpose.ROTATE_90).save(folder / "e.png", exif=exif)
    (folder / "f_é.jpg").write_bytes((folder / "a.png").read_bytes())  # the kind is wrong
    return folder


def test_every_kind_of_image_gets_timms_answer(run, pictures, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(predict, "BEST", 9)  # more than the 7 classes
    content = io.BytesIO((pictures / "a.png").read_bytes())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))
    with Image.open(pictures / "a.png") as picture:
        values, labels = timm_logits(run, [picture])[0].softmax(0).topk(7)
    file = tmp_path / "new" / "features.npy"
    predict.main([str(run), str(pictures), "-", "--json", "--features", str(file)])
    out, err = capsys.readouterr()
    assert err == f"features   {file}: float32 [7, 32]\n"
    answers = [json.loads(line) for line in out.splitlines()]
    assert [Path(answer["image"]).name[0] for answer in answers] == list("abcdef-")
    weights = open_run(str(run)).load_weights()
    logits = F.linear(torch.tensor(np.load(file)), weights["head.weight"], weights["head.bias"])
    for answer, shares in zip(answers, logits.softmax(1), strict=True):
        for found, value, label in zip(answer["classes"], values, labels, strict=True):
            assert (found["label"], found["class"]) == (label, NAMES[label])
            for share in (found["probability"], shares[label]):
                assert share == pytest.approx(value.item(), abs=2e-3)


def test_what_is_no_image_is_named_and_the_others_are_answered(
    run, pictures, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(predict, "BATCH", 2)
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "short.png").write_bytes((pictures / "a.png").read_bytes()[:2000])
    shutil.copy(pictures / "a.png", tmp_path / "z.png")
    names = [tmp_path / name for name in ("text.jpg", "short.png", "gone.png", "z.png")]
    with pytest.raises(PartialError, match="not all images have an answer"):
        predict.main([str(run), *map(str, names), f"--features={tmp_path}/all.parquet"])
    out, err = capsys.readouterr()
    line, last = out.splitlines()[-2:]
    assert last == f"features   {tmp_path}/all.parquet: float32 [4, 32]"
    assert re.fullmatch(rf"{names[3]}: (\S+ [\d.]+ %(; |$)){{5}}", line)
    unreadable = "not a readable image: "
    assert re.fullmatch(
        f"error: {names[0]}: {unreadable}not of a kind that is read\n"
        f"error: {names[1]}: {unreadable}.*\n"
        f"error: {names[2]}: No such file or directory\n",
        err,
    )
    table = read_table(tmp_path / "all.parquet").to_pydict()
    assert table["image"] == list(map(str, names))
    assert np.isnan(table["features"]).sum(1).tolist() == [32, 32, 32, 0]


def test_a_model_without_an_answer_ends_with_2_whatever_follows(monkeypatch):
    answers = [{"image": "a", "classes": None, "error": "NaN"}, {"image": "b", "error": "missing"}]
    opened = SimpleNamespace(class_names=["x"], metadata={"data": {}})
    monkeypatch.setattr(predict, "open_model", lambda *_, **__: opened)
    monkeypatch.setattr(predict, "name_classes", lambda *_: None)
    monkeypatch.setattr(predict, "predict", lambda *_: iter(answers))
    with pytest.raises(PartialError) as error:
        predict.main(["run", "a", "b", "--json"])
    assert error.value.status == 2


def test_features_of_every_batch_are_those_of_its_images(run, tmp_path, monkeypatch):
    monkeypatch.setattr(predict, "BATCH", 2)
    pictures = [noise_image(20, 20, seed) for seed in range(3)]
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"{number}.png")
    file = tmp_path / "features.npy"
    predict.main([str(run), str(tmp_path), "--features", str(file)])
    weights = open_run(str(run)).load_weights()
    logits = F.linear(torch.tensor(np.load(file)), weights["head.weight"], weights["head.bias"])
    torch.testing.assert_close(logits, timm_logits(run, pictures), rtol=0, atol=0.02)


def test_the_weights_of_a_run_are_read_once_and_threads_may_share_it(run, tmp_path, monkeypatch):
    names = [f"{tmp_path}/{seed}.png" for seed in range(6)]
    for seed, name in enumerate(names):
        noise_image(40, 40, seed).save(name)
    expected = [answer["features"] for answer in predict.predict(open_run(str(run)), names)]
    opened = open_run(str(run))
    forward = Predictor.__call__

    def forward_and_wait(*args: Any) -> torch.Tensor:
        """Let the other threads have their turn before this one reads of its forward pass."""
        logits = forward(*args)
        time.sleep(0.01)
        return logits

    monkeypatch.setattr(Predictor, "__call__", forward_and_wait)
    loaded = Mock(wraps=opened.load_model)
    monkeypatch.setattr(SavedRun, "load_model", lambda _: loaded())
    with ThreadPoolExecutor(6) as pool:
        answers = pool.map(lambda name: next(predict.predict(opened, [name])), names * 9)
    for answer, features in zip(list(answers), expected * 9, strict=True):
        np.testing.assert_allclose(answer["features"], features, atol=2e-3)
    assert loaded.call_count == 1


def test_names_that_are_not_utf8_have_a_row_of_features(run, pictures, tmp_path, capsys):
    """Linux allows any bytes, as unpacked archives of other systems have them."""
    image = shutil.copy(pictures / "a.png", tmp_path / os.fsdecode(b"caf\xe9.png"))
    file = tmp_path / "all.parquet"
    predict.main([str(run), str(image), "--features", str(file)])
    assert read_table(file).to_pydict()["image"] == [f"{tmp_path}/caf\\xe9.png"]
    assert capsys.readouterr().out.splitlines()[-1] == f"features   {file}: float32 [1, 32]"


def test_a_file_of_features_is_refused_before_the_model_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(predict, "find_spec", lambda module: None)
    for name, message in {
        "a.csv": "name a file that ends in .npy or .parquet",
        "a.parquet": "needs pyarrow: pip install pyarrow",
    }.items():
        with pytest.raises(UserError, match=f"--features {name}:? {message}"):
            predict.main(["gone", "a.png", "--features", name])


def test_the_librarys_page_classifies_images(run, pictures, capsys):
    text = (ROOT / "docs" / "library.md").read_text()
    blocks = re.findall("```python\n(.*?)```", text, re.DOTALL)
    code = next(block for block in blocks if "outputs/mine" in block)
    code = code.replace("outputs/mine", str(run)).replace("cat.jpg", "gone.png")
    exec(code.replace("photographs", str(pictures)), {})
    unread, *rows, shape = capsys.readouterr().out.splitlines()
    assert unread == "gone.png: No such file or directory"
    assert {row.split()[1] for row in rows} <= {*NAMES}
    assert shape == f"({len(rows)}, 32)" == "(6, 32)"


@pytest.mark.parametrize("images", ["a.png", [Image.new("RGB", (9, 9))], [b"a.png"]])
def test_images_that_are_no_list_of_paths_are_refused(run, images):
    with pytest.raises(TypeError, match="^predict takes a list of paths, not ['[]"):
        next(predict.predict(open_run(str(run)), images))
