"""Exports: the code in the model card computes timm's logits."""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import timm
import torch
from huggingface_hub import ModelCard
from PIL import Image
from timm.data import create_transform

from common.checkpoint.pretrained import load_pretrained
from common.checkpoint.saved_run import open_run
from common.errors import UserError
from common.metrics.writers import read_metrics
from common.model.vit import build_model
from common.testing.tiny_task import MODEL, NAMES, timm_logits, train
from common.tools import export, predict
from common.tools.timm_format import crop_share

WEIGHTS = {"timm": ["model.safetensors"], "safetensors": ["model.safetensors"], "onnx": ["model.onnx"]}


@pytest.fixture(scope="module", params=WEIGHTS)
def exported(request, run) -> tuple[str, Path]:
    before = os.umask(0o077 if request.param == "timm" else 0o022)
    export.main([str(run), "--to", request.param])
    os.umask(before)
    return request.param, run / "export" / "step-00000010" / request.param


def test_the_umask_says_who_may_read_the_files(exported):
    target, folder = exported
    modes = {(folder / name).stat().st_mode & 0o777 for name in ("README.md", "config.json", *WEIGHTS[target])}
    assert modes == {0o600 if target == "timm" else 0o644}


def run_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Return the ``logits`` of the card's Python, run in the export's folder on a picture."""
    picture = Image.fromarray(np.random.default_rng(3).integers(0, 256, (6, 8, 3), np.uint8))
    picture.resize((40, 30), Image.Resampling.BICUBIC).save(folder / "image.jpg")
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    monkeypatch.chdir(folder)
    namespace = {}
    exec(code, namespace)
    logits = namespace["logits"]
    return logits.detach().numpy() if isinstance(logits, torch.Tensor) else logits


def test_the_cards_own_lines_give_timms_logits(run, exported, monkeypatch, capsys):
    _, folder = exported
    logits = run_card(folder, monkeypatch)
    with Image.open(folder / "image.jpg") as image:
        expected = timm_logits(run, [image])
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    predict.main([str(run), str(folder / "image.jpg"), "--json"])
    classes = json.loads(capsys.readouterr().out)["classes"]
    shares = torch.from_numpy(logits).softmax(1)[0]
    assert [found["probability"] for found in classes] == pytest.approx(shares.topk(5).values.tolist(), abs=2e-3)


def test_the_card_is_one_that_the_hub_reads(run, exported):
    target, folder = exported
    card = ModelCard.load(folder / "README.md")
    last = read_metrics(run)[-1]
    results = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert results == {"top-1": round(last["top1"], 4), "top-5": round(last["top5"], 4)}
    assert card.data.pipeline_tag == "image-classification"
    tags = card.data.to_dict()
    assert tags["library_name"] == {"onnx": "onnx"}.get(target, "timm")
    assert "10 of 10 optimizer steps of 14 images" in card.text
    assert "70 images for training and 45 for evaluation, in 7 classes" in card.text
    assert f"{sum(p.numel() for p in build_model(**MODEL, num_classes=7).parameters()):,} parameters" in card.text
    config = json.loads(re.search(r"```json\n(.*?)```", card.text, re.DOTALL)[1])
    assert config["TOTAL_BATCH_SIZE"] == 14
    assert str(run.parent) not in (folder / "README.md").read_text()
    assert json.loads((folder / "config.json").read_text())["label_names"] == list(NAMES)


def test_the_onnx_model_is_valid_and_tells_nothing_of_this_machine(run, tmp_path):
    export.export(open_run(str(run)), "onnx", tmp_path / "onnx")
    model = onnx.load(tmp_path / "onnx" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert str(Path(export.__file__).parent).encode() not in (tmp_path / "onnx" / "model.onnx").read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        "pool=avg position=sincos2d",
        "image_size=32 patch_size=16 depth=1",
        "init_values=0.1 reg_tokens=2 no_embed_class=True",
    ],
)
def test_any_shape_goes_into_timm(data, tmp_path, arguments):
    shaped = train(data, tmp_path / "run", *(f"MODEL.{argument}" for argument in arguments.split()))
    export.export(open_run(str(shaped)), "timm", tmp_path / "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    ours = build_model(**open_run(str(shaped)).config["MODEL"])
    shapes = ({name: p.shape for name, p in model.named_parameters()} for model in (theirs, ours))
    assert next(shapes) == next(shapes)
    assert load_pretrained(ours, str(tmp_path / "timm")) == f"starting from the weights of {tmp_path / 'timm'}"


def test_what_differs_from_the_checkpoint_is_not_passed_off(run, tmp_path, monkeypatch):
    monkeypatch.setitem(export.WRITERS, "timm", lambda model, size, output: lambda images: model(images) * 1.001)
    with pytest.raises(UserError, match="its logits differ from the checkpoint's by 1.0e-03 of the largest: do not"):
        export.export(open_run(str(run)), "timm", tmp_path / "timm")


def test_a_folder_with_something_in_it_is_left_alone(run):
    with pytest.raises(UserError, match="is not empty: choose another folder with --output DIR, or"):
        export.main([str(run), "--to", "timm", "--output", str(run)])


def test_what_onnx_needs_is_named(run, monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxscript" else sys)
    with pytest.raises(UserError, match="--to onnx needs onnxscript: pip install onnxscript"):
        export.main([str(run), "--to", "onnx", "--output", "unused"])


def test_timm_works_out_the_same_short_side():
    for size in range(16, 520, 4):
        for eval_crop in (0.5, 0.7, 0.8, 0.85, 0.875, 0.9, 0.95, 1.0):
            short_side = int(size / eval_crop)
            transform = create_transform((3, size, size), crop_pct=crop_share(size, short_side))
            assert transform.transforms[0].size == short_side
