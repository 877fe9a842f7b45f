"""A step of 32,768 images of vit-b16.py with a small ViT, compared with a plain loop of timm's
model.
"""

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
from common.testing.photographs import write_photographs
from imagenet_dali import prepare, testing
from imagenet_dali.task import build_train_loader
from imagenet_dali.testing import run

# Dropout is off, because its masks depend on how a batch is split.
MODEL = testing.MODEL | dict(num_classes=9, dropout=0.0)
MAX_NORM = 0.05  # below the gradient's norm here, so that clipping acts
BETA1 = 0.9
RANKS, TOTAL, MICRO = (
    2,
    32 * 1024,
    256,
)  # images of an optimizer step and of a process's micro-batch, as in the recipe


def gradient_of_timm(data: Path, weights: Path) -> dict[str, Tensor]:
    """Return the gradient of the mean loss in float64 on what all ranks train on in the first
    step.
    """
    model = VisionTransformer(**timm_arguments(**MODEL))
    model.load_state_dict(load_file(weights))
    model.double()
    config = load_config("vit-b16", [f"DATA.root={data}"])
    for rank in range(RANKS):
        place = dict(
            image_size=MODEL["image_size"], device=torch.device("cpu"), dp_rank=rank, dp_size=RANKS
        )
        loader = build_train_loader(config["DATA"], TOTAL, MICRO, seed=config["SEED"], **place)
        for images, labels in BatchAugment(loader, config):
            first, second = (
                F.one_hot(labels[key], MODEL["num_classes"]).double() for key in ("target", "other")
            )
            share = labels["share"].double()
            blend = share * first + (1 - share) * second
            (-(blend * model(images.double()).log_softmax(1)).sum() / TOTAL).backward()
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
    data, weights, output = tmp_path / "shards", tmp_path / "model.safetensors", tmp_path / "run"
    prepare.prepare(tmp_path / "images", data, workers=2)
    torch.manual_seed(0)
    save_file(build_model(**MODEL).state_dict(), weights)

    settings = [
        "MAX_STEPS=1",
        f"clip_grad_norm={MAX_NORM}",
        "LOG.every=1",
        "LOG.tensorboard=False",
        "fp16=None",
    ]
    words = " ".join(
        f"--set {each}"
        for each in [*(f"MODEL.{key}={value}" for key, value in MODEL.items()), *settings]
    )
    torchrun = f"python -m torch.distributed.run --standalone --nproc_per_node {RANKS}"
    command = (
        f"{torchrun} train_dali.py --config vit-b16.py --init {weights} --output {output} {words}"
    )
    run(command, timeout=1800, DATA=str(data))
    expected = gradient_of_timm(data, weights)
    norm = read_metrics(output)[0]["grad_norm"]
    state = load_file(output / "checkpoints" / "step-00000001" / "optimizer.safetensors")
    scale = min(1.0, MAX_NORM / (norm + 1e-6)) * (1 - BETA1)
    difference = {
        name: state[f"exp_avg/{name}"].double() / scale - expected[name] for name in expected
    }
    assert MAX_NORM < norm == pytest.approx(length(expected), rel=1e-5)
    assert length(difference) <= 1e-5 * length(expected)
