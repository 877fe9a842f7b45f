"""A step of 32,768 images of vit-b16.py with a small ViT, against a plain loop of timm's model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from common.config.load import load_config
from common.data.batch_augment import BatchAugment
from common.metrics.metrics_file import read_metrics
from common.model.build import build_model, timm_arguments
from common.shards import prepare
from common.testing.commands import in_words
from common.testing.photographs import write_photographs
from imagenet_dali import testing
from imagenet_dali.task import build_train_loader
from imagenet_dali.testing import run

# Dropout is off, because its masks depend on how a batch is split.
MODEL = testing.MODEL | dict(num_classes=9, dropout=0.0)
MAX_NORM = 0.05  # below the gradient's norm here, so that clipping acts
BETA1 = 0.9
RANKS = 2
# images of an optimizer step and of a process's micro-batch, as in the recipe
TOTAL = 32 * 1024
MICRO = 256


def gradient_of_timm(data: Path, weights: Path) -> dict[str, Tensor]:
    """Return the gradient in float64 of the mean loss over the first step's images of all ranks."""
    model = VisionTransformer(**timm_arguments(**MODEL))
    model.load_state_dict(load_file(weights))
    model.double()
    config = load_config("vit-b16", [f"DATA.root={data}"])
    for rank in range(RANKS):
        place = dict(
            image_size=MODEL["image_size"], device=torch.device("cpu"), dp_rank=rank, dp_size=RANKS
        )
        loader = build_train_loader(config["DATA"], TOTAL, MICRO, seed=config["SEED"], **place)
        data = config["DATA"]
        loader.augment = BatchAugment(
            config["SEED"], data["mean"], data["std"], mixup=config["MIXUP"]
        )
        for images, labels in loader:
            logits = model(images.double())
            lam = labels["lam"].double()
            loss = lam * F.cross_entropy(logits, labels["target"], reduction="sum")
            loss += (1 - lam) * F.cross_entropy(logits, labels["other"], reduction="sum")
            (loss / TOTAL).backward()
        loader.close()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def length(tensors: dict[str, Tensor]) -> float:
    return sum(value.square().sum().item() for value in tensors.values()) ** 0.5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_32k_images_in_float32(tmp_path):
    """The gradient before clipping, from LAMB's first moments, is timm's."""
    # few files differ, but every one of nine classes has all of them, and every crop is another one
    for split, images in (("train", TOTAL + 1000), ("val", 50)):
        write_photographs(tmp_path / "images" / split, "abcdefghi", images, 20, 20)
    data = tmp_path / "shards"
    weights = tmp_path / "model.safetensors"
    output = tmp_path / "run"
    prepare.prepare(tmp_path / "images", data, workers=2)
    torch.manual_seed(0)
    save_file(build_model(**MODEL).state_dict(), weights)

    settings = [f"MODEL.{key}={value}" for key, value in MODEL.items()]
    settings += ["MAX_STEPS=1", f"clip_grad_norm={MAX_NORM}", "LOG.every=1", "fp16=None"]
    words = " ".join(in_words(*settings))
    torchrun = f"python -m torch.distributed.run --standalone --nproc_per_node {RANKS}"
    command = (
        f"{torchrun} train_dali.py --config vit-b16.py --init {weights} --output {output} {words}"
    )
    run(command, timeout=1800, DATA=str(data))
    expected = gradient_of_timm(data, weights)
    norm = read_metrics(output)[0]["grad_norm"]
    state = load_file(output / "checkpoints" / "step-00000001" / "optimizer.safetensors")
    scale = min(1.0, MAX_NORM / (norm + 1e-6)) * (1 - BETA1)
    difference = {}
    for name, gradient in expected.items():
        difference[name] = state[f"exp_avg/{name}"].double() / scale - gradient
    assert MAX_NORM < norm == pytest.approx(length(expected), rel=1e-5)
    assert length(difference) <= 1e-5 * length(expected)
