"""Exports: other programs compute timm's logits from them."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from timm.data import create_dataset, create_loader, create_transform, resolve_data_config
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torchvision.datasets import ImageFolder

from common.checkpoint.saved_run import open_run
from common.checkpoint.weights import load_pretrained, open_model
from common.errors import UserError
from common.files import ROOT
from common.metrics.metrics_file import read_metrics
from common.model.build import build_model
from common.testing.photographs import noise_image
from common.testing.tiny_task import NAMES, SAMPLES, timm_logits, train
from common.tools import evaluate, export


def logits_of(folder: Path, target: str, image: Image.Image) -> np.ndarray:
    """Return what a user's program computes from an export, with timm's preprocessing."""
    data_config = resolve_data_config(pretrained_cfg=read_config(folder)["pretrained_cfg"])
    transform = create_transform(**data_config)
    images = transform(image)[None]
    if target == "onnx":
        content = (folder / "model.onnx").read_bytes()
        session = onnxruntime.InferenceSession(content)
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        return logits
    model = load_with_timm(folder) if target == "timm" else load_by_metadata(folder)
    with torch.no_grad():
        return model.eval()(images).numpy()


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def load_with_timm(folder: Path) -> nn.Module:
    name = f"local-dir:{folder}"
    timm.create_model(name, pretrained=True, num_classes=3, in_chans=1)  # a new head and stem
    return timm.create_model(name, pretrained=True)


def load_by_metadata(folder: Path) -> nn.Module:
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["config"])
    model = VisionTransformer(
        num_classes=config["num_classes"],
        **config["model_args"],
    )
    model.load_state_dict(load_file(path))
    return model


@pytest.mark.parametrize("target", export.FORMATS)
def test_an_export_gives_timms_logits(run, target, tmp_path):
    export.main([str(run), "--to", target])
    folder = run / "export" / "step-00000010" / target
    picture = noise_image(6, 8, seed=3).resize((40, 30))
    expected = timm_logits(run, [picture])
    found = logits_of(folder, target, picture)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    hf_config = read_config(folder)
    assert hf_config["label_names"] == list(NAMES)
    assert hf_config["checkpoint"] == "step-00000010/model.safetensors"
    new = tmp_path / "new"
    new.touch()  # the umask says who may read it
    modes = {file.stat().st_mode for file in folder.iterdir()}
    assert modes == {new.stat().st_mode}


def test_an_onnx_file_is_valid_and_says_what_it_was_exported_with(run, tmp_path, capsys):
    export.main([str(run), "--to", "onnx", "--output", str(tmp_path)])
    path = tmp_path / "model.onnx"
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    first_dimension = model.graph.input[0].type.tensor_type.shape.dim[0]
    assert first_dimension.dim_param == "batch"
    assert str(ROOT).encode() not in path.read_bytes()
    metadata = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert metadata == {
        "class_names": list(NAMES),
        "preprocessing": read_config(tmp_path)["pretrained_cfg"],
    }
    opset = model.opset_import[0].version
    assert f"(opset {opset})\n" in capsys.readouterr().out


@pytest.mark.parametrize("target", export.FORMATS)
def test_an_exports_logits_are_divided_by_the_temperature(run, target, tmp_path):
    folder = tmp_path / target
    export.main([str(run), "--to", target, "--output", str(folder), "--temperature", "2.5"])
    noise = np.random.default_rng(3).integers(0, 256, (30, 40, 3), np.uint8)
    picture = Image.fromarray(noise)
    expected = timm_logits(run, [picture]) / 2.5
    found = logits_of(folder, target, picture)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert read_config(folder)["temperature"] == 2.5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its open files
def test_timms_validate_gives_our_top1(run, data, tmp_path):
    """Build model and loader as timm's validate.py, which its package does not have."""
    folder = tmp_path / "timm"
    export.main([str(run), "--to", "timm", "--output", str(folder)])
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    config = resolve_data_config(model=model, use_test_size=True)
    dataset = create_dataset("", root=data / "test", split="validation")
    loader = create_loader(
        dataset,
        batch_size=SAMPLES["test"],
        use_prefetcher=False,
        num_workers=0,
        input_size=config["input_size"],
        interpolation=config["interpolation"],
        mean=config["mean"],
        std=config["std"],
        crop_pct=config["crop_pct"],
        crop_mode=config["crop_mode"],
    )
    (batch,) = loader
    images, labels = batch
    is_right = model(images).argmax(1) == labels
    top1 = is_right.sum().item() / SAMPLES["test"]
    assert top1 == read_metrics(run)[-1]["top1"]


def test_timm_gives_the_printed_top1_of_averages_with_the_documented_file(data, tmp_path, capsys):
    """README.md sends timm's users to checkpoints/best/model.safetensors."""
    averaged = train(data, tmp_path / "run", "EMA=0.9", "EMA_WARMUP=False", "LEARNING_RATE=1e-3")
    pictures, labels = zip(*ImageFolder(data / "test"), strict=True)
    labels = torch.tensor(labels)
    transform = create_transform((3, 16, 16), crop_pct=0.8)
    images = torch.stack([transform(picture) for picture in pictures])

    def top1_by_timm(file: str) -> float:
        path = averaged / "checkpoints" / "best" / file
        model = timm.create_model(
            "vit_base_patch16_224",
            checkpoint_path=str(path),
            num_classes=7,
            img_size=16,
            patch_size=8,
            embed_dim=32,
            depth=2,
            num_heads=2,
            mlp_ratio=2,
        )
        model.eval()
        is_right = model(images).argmax(1) == labels
        return is_right.float().mean().item()

    of_averages = top1_by_timm("model.safetensors")
    evaluate.main([str(averaged)])
    assert f"top1={of_averages:.4f} " in capsys.readouterr().out

    of_weights = top1_by_timm("raw.safetensors")
    evaluate.main([str(averaged), "--raw"])
    assert f"top1={of_weights:.4f} " in capsys.readouterr().out

    assert of_averages != of_weights
    evaluations = [line for line in read_metrics(averaged) if line["kind"] == "eval"]
    best = max(line["top1"] for line in evaluations)
    assert of_averages == pytest.approx(best)


@pytest.mark.trackers
@pytest.mark.filterwarnings("default")  # those of transformers are not ours
def test_transformers_pipeline_gives_the_models_classes(run, data, tmp_path):
    from transformers import pipeline

    folder = tmp_path / "timm"
    export.main([str(run), "--to", "timm", "--output", str(folder)])
    classify = pipeline("image-classification", str(folder))
    pictures = [picture for picture, _ in ImageFolder(data / "test")]
    found = [best["label"] for best, *_ in classify(pictures)]
    labels = timm_logits(run, pictures).argmax(1)
    expected = [NAMES[label] for label in labels.tolist()]
    assert found == expected
    assert len(set(found)) > 1


@pytest.mark.parametrize("init_values", [None, 0.1])
def test_rms_norm_and_swiglu_are_exported_evaluated_and_started_from(init_values, data, tmp_path):
    """timm takes no class of an MLP from a file: the architecture is one that has it."""
    folder = train(
        data,
        tmp_path / "run",
        "MODEL.norm=rmsnorm",
        "MODEL.mlp=swiglu",
        f"MODEL.init_values={init_values}",
    )
    run = open_run(str(folder))
    for target in export.FORMATS:
        difference = export.export(run, target, tmp_path / target)
        assert difference < 1e-5
    images = torch.randn(3, 3, 16, 16)
    expected = run.load_model()(images)
    exported = open_model(str(tmp_path / "timm")).load_model()
    torch.testing.assert_close(exported(images), expected)
    again = build_model(**run.config["MODEL"])
    load_pretrained(again, str(tmp_path / "timm"))
    again.eval()
    torch.testing.assert_close(again(images), expected)


def test_what_timm_has_not_goes_into_the_other_formats(data, tmp_path):
    folder = train(
        data,
        tmp_path / "run",
        "MODEL.stem=residual",
        "MODEL.pool=seq",
        "DATA.mean=(0.5,0.4,0.5)",
    )
    run = open_run(str(folder))
    for target in ("safetensors", "onnx"):
        difference = export.export(run, target, tmp_path / target)
        assert difference < 1e-5
    with pytest.raises(UserError, match="^--to timm: timm has no stem='conv'"):
        export.export(run, "timm", tmp_path / "timm")
    exported = open_model(str(tmp_path / "safetensors" / "model.safetensors")).load_model()
    images = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(exported(images), run.load_model()(images))
    hf_config = read_config(tmp_path / "onnx")
    assert hf_config["num_features"] == 32
    assert hf_config["pretrained_cfg"]["mean"] == [0.5, 0.4, 0.5]


def test_a_file_of_a_checkpoint_is_refused_since_its_images_preparation_is_unknown(run, tmp_path):
    checkpoint = open_run(str(run)).checkpoint
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    for folder in (checkpoint, tmp_path):
        with pytest.raises(UserError, match=": is a file of a run's checkpoint: name the checkpo"):
            open_model(str(folder / "model.safetensors"))


def test_refusals(run, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="is not empty: choose another folder"):
        export.main([str(run), "--to", "timm", "--output", str(run)])

    def wrong(model: nn.Module, size: int, output: Path) -> export.Forward:
        return lambda images: model(images) * 1.001

    monkeypatch.setitem(export.FORMATS, "timm", wrong)
    with pytest.raises(UserError, match="differ from the checkpoint's by 1.0e-03 of the largest"):
        export.export(open_run(str(run)), "timm", tmp_path / "timm")


def test_timm_works_out_the_same_short_side():
    for size in range(16, 520, 4):
        for eval_crop in (0.5, 0.7, 0.8, 0.85, 0.875, 0.9, 0.95, 1.0):
            short_side = int(size / eval_crop)
            share = export.crop_share(size, short_side)
            transform = create_transform((3, size, size), crop_pct=share)
            resize = transform.transforms[0]
            assert resize.size == short_side
