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


def predict_and_save(run: Path, *images: Path | str, features: Path) -> None:
    predict.main([str(run), *map(str, images), "--features", str(features)])


def logits_from(features: Path, run: Path) -> torch.Tensor:
    """Return the logits that the run's head makes of a file of features."""
    weights = open_run(str(run)).load_weights()
    rows = torch.tensor(np.load(features))
    return F.linear(rows, weights["head.weight"], weights["head.bias"])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """The same picture in many kinds of files; two have to be turned."""
    folder = tmp_path_factory.mktemp("pictures")
    picture = noise_image(5, 6, seed=1).resize((60, 44), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    picture.save(folder / "a.png")
    with_alpha = picture.convert("RGBA")
    with_alpha.save(folder / "b.webp", lossless=True)
    picture.save(folder / "c.bmp")
    picture.save(folder / "d.tiff")
    turned = picture.transpose(Image.Transpose.ROTATE_90)
    turned.save(folder / "e.png", exif=exif)
    shutil.copy(folder / "a.png", folder / "f_é.jpg")  # the kind is wrong
    return folder


def test_every_kind_of_image_gets_timms_answer(run, pictures, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(predict, "BEST", 9)  # more than the 7 classes
    content = io.BytesIO((pictures / "a.png").read_bytes())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))
    with Image.open(pictures / "a.png") as picture:
        (expected_logits,) = timm_logits(run, [picture])
    probabilities, labels = expected_logits.softmax(0).topk(7)
    file = tmp_path / "new" / "features.npy"
    predict_and_save(run, pictures, "-", "--json", features=file)
    out, err = capsys.readouterr()
    assert err == f"features   {file}: float32 [7, 32]\n"
    answers = [json.loads(line) for line in out.splitlines()]
    first_letters = [Path(answer["image"]).name[0] for answer in answers]
    assert first_letters == ["a", "b", "c", "d", "e", "f", "-"]
    shares = logits_from(file, run).softmax(1)
    for answer, of_features in zip(answers, shares, strict=True):
        expected = zip(labels.tolist(), probabilities.tolist(), strict=True)
        for found, (label, probability) in zip(answer["classes"], expected, strict=True):
            assert found["label"] == label
            assert found["class"] == NAMES[label]
            assert found["probability"] == pytest.approx(probability, abs=2e-3)
            assert of_features[label] == pytest.approx(probability, abs=2e-3)


def test_what_is_no_image_is_named_and_the_others_are_answered(
    run, pictures, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(predict, "BATCH", 2)
    content = (pictures / "a.png").read_bytes()
    text = tmp_path / "text.jpg"
    short = tmp_path / "short.png"
    gone = tmp_path / "gone.png"
    whole = tmp_path / "z.png"
    text.write_text("no image")
    short.write_bytes(content[:2000])
    whole.write_bytes(content)
    file = tmp_path / "all.parquet"
    with pytest.raises(PartialError, match="not all images have an answer"):
        predict_and_save(run, text, short, gone, whole, features=file)
    out, err = capsys.readouterr()
    line, last = out.splitlines()[-2:]
    assert last == f"features   {file}: float32 [4, 32]"
    assert re.fullmatch(rf"{whole}: (\S+ [\d.]+ %(; |$)){{5}}", line)
    unreadable = "not a readable image: "
    assert re.fullmatch(
        f"error: {text}: {unreadable}not of a kind that is read\n"
        f"error: {short}: {unreadable}.*\n"
        f"error: {gone}: No such file or directory\n",
        err,
    )
    table = read_table(file).to_pydict()
    assert table["image"] == [str(text), str(short), str(gone), str(whole)]
    missing = np.isnan(table["features"]).sum(1)
    assert missing.tolist() == [32, 32, 32, 0]


def test_a_model_without_an_answer_ends_with_2_whatever_follows(monkeypatch):
    answers = [
        {"image": "a", "classes": None, "error": "NaN"},
        {"image": "b", "error": "missing"},
    ]
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
    predict_and_save(run, tmp_path, features=file)
    logits = logits_from(file, run)
    expected = timm_logits(run, pictures)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.02)


def test_the_weights_of_a_run_are_read_once_and_threads_may_share_it(run, tmp_path, monkeypatch):
    names = [f"{tmp_path}/{seed}.png" for seed in range(6)]
    for seed, name in enumerate(names):
        picture = noise_image(40, 40, seed)
        picture.save(name)
    answers = predict.predict(open_run(str(run)), names)
    expected = [answer["features"] for answer in answers]
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

    def predict_one(name: str) -> dict:
        return next(predict.predict(opened, [name]))

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(predict_one, names * 9))
    for answer, features in zip(answers, expected * 9, strict=True):
        np.testing.assert_allclose(answer["features"], features, atol=2e-3)
    assert loaded.call_count == 1


def test_names_that_are_not_utf8_have_a_row_of_features(run, pictures, tmp_path, capsys):
    """Linux allows any bytes, as unpacked archives of other systems have them."""
    image = tmp_path / os.fsdecode(b"caf\xe9.png")
    shutil.copy(pictures / "a.png", image)
    file = tmp_path / "all.parquet"
    predict_and_save(run, image, features=file)
    table = read_table(file).to_pydict()
    assert table["image"] == [f"{tmp_path}/caf\\xe9.png"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"features   {file}: float32 [1, 32]"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.csv", "name a file that ends in .npy or .parquet"),
        ("a.parquet", "needs pyarrow: pip install pyarrow"),
    ],
)
def test_a_file_of_features_is_refused_before_the_model_is_read(name, message, monkeypatch):
    monkeypatch.setattr(predict, "find_spec", lambda module: None)
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
    answers = {row.split()[1] for row in rows}
    assert answers <= {*NAMES}
    assert len(rows) == 6
    assert shape == "(6, 32)"


@pytest.mark.parametrize(
    "images",
    [
        "a.png",
        [Image.new("RGB", (9, 9))],
        [b"a.png"],
    ],
)
def test_images_that_are_no_list_of_paths_are_refused(run, images):
    opened = open_run(str(run))
    with pytest.raises(TypeError, match="^predict takes a list of paths, not ['[]"):
        next(predict.predict(opened, images))
