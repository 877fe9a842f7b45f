"""Steps of vit-b16.py with a small ViT: DALI, Mixup, LAMB, clipping; against plain loops of timm's model.

Fast at a batch of 64; `pytest -m slow imagenet_dali/large_step_test.py` takes steps of 32,768 images, also in bfloat16.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from common.config.model_arguments import timm_arguments
from common.data.batch_augment import BatchAugment
from common.metrics.writers import read_metrics
from common.model.vit import build_model
from imagenet_dali import prepare
from imagenet_dali.dataloader import build_train_loader
from imagenet_dali.testing import run

# A ViT-Lite cut to two blocks. Dropout is off, because its masks depend on how a batch is split.
MODEL = dict(image_size=32, patch_size=8, width=64, depth=2, heads=2, mlp_ratio=2.0, num_classes=10, dropout=0.0)
STEPS, RANKS = 2, 2
MAX_NORM = 0.05  # below every gradient's norm here, so that clipping acts
BETA1 = 0.9


class Size(NamedTuple):
    """Images of an optimizer step and of a process's micro-batch."""

    total: int
    micro: int


SMALL, LARGE = Size(64, 8), Size(32 * 1024, 256)  # the large one in the recipe's own micro-batches


def prepare_images(folder: Path, count: int) -> Path:
    """Prepare ``count`` JPEGs of 32 x 32 pixels in ten classes, as CIFAR-10 has them, and a few for validation."""
    random = np.random.default_rng(0)
    for number in range(count + 50):
        label = number % 10
        path = folder / "images" / ("train" if number < count else "validation") / str(label) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = random.integers(0, 256, (4, 4, 3), np.uint8) // 2 + np.uint8(12 * label)
        Image.fromarray(small).resize((32, 32), Image.Resampling.BILINEAR).save(path, quality=75)
    prepare.main([str(folder / "images"), str(folder / "shards"), "--workers", "2"])
    return folder / "shards"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(build_model(**MODEL).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_images(tmp_path_factory.mktemp("few"), SMALL.total + 10)


@pytest.fixture(scope="module")
def many_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_images(tmp_path_factory.mktemp("many"), LARGE.total + 1000)


def train(data: Path, weights: Path, output: Path, size: Size, *settings: str, timeout: float = 300) -> Path:
    """Train ``STEPS`` optimizer steps of the flagship's recipe as a user does; return the run's folder."""
    settings = (
        *(f"MODEL.{key}={value}" for key, value in MODEL.items()),
        *(f"TOTAL_BATCH_SIZE={size.total}", f"MICRO_BATCH_SIZE={size.micro}", f"MAX_STEPS={STEPS}"),
        *(f"clip_grad_norm={MAX_NORM}", "CHECKPOINT_EVERY=1", "LOG.every=1", "LOG.tensorboard=False"),
        *settings,
    )
    torchrun = f"python -m torch.distributed.run --standalone --nproc_per_node {RANKS}"
    words = " ".join(f"--set {setting}" for setting in settings)
    command = f"{torchrun} train_dali.py --config vit-b16.py --init {weights} --output {output} {words}"
    run(command, timeout=timeout, DATA=str(data))
    return output


def micro_batches(
    config: dict[str, Any], size: Size, rank: int, epoch: int
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield what ``rank`` trains on in ``epoch``, whose only step holds the first ``size.total`` of its order."""
    place = dict(image_size=MODEL["image_size"], device=torch.device("cpu"), dp_rank=rank, dp_size=RANKS)
    loader = build_train_loader(config["DATA"], size.total, size.micro, seed=config["SEED"], **place)
    loader = BatchAugment(loader, mixup=config["MIXUP"], cutmix=0.0, erasing=0.0, seed=config["SEED"])
    loader.load_state_dict({"epoch": epoch, "samples": 0})
    yield from loader
    loader.close()


def plain_gradient(config: dict[str, Any], weights: dict[str, Tensor], size: Size, epoch: int) -> dict[str, Tensor]:
    """Return the gradient of the mean loss of a step, of timm's model in float64, one micro-batch after the other."""
    model = VisionTransformer(**timm_arguments(**MODEL))
    model.load_state_dict(weights, strict=True)
    model.double()
    images_seen = 0
    for rank in range(RANKS):
        for images, labels in micro_batches(config, size, rank, epoch):
            first, second = (F.one_hot(labels[key], MODEL["num_classes"]).double() for key in ("target", "other"))
            share = labels["share"].double()
            blend = share * first + (1 - share) * second
            (-(blend * model(images.double()).log_softmax(1)).sum() / size.total).backward()
            images_seen += len(images)
    assert images_seen == size.total
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def trained_gradient(output: Path, step: int, norm: float) -> dict[str, Tensor]:
    """Return the gradient of ``step`` before clipping, out of LAMB's first moments in the checkpoints."""
    after, before = (_first_moments(output, number) for number in (step, step - 1))
    kept = min(1.0, MAX_NORM / (norm + 1e-6))
    return {name: (after[name] - BETA1 * before.get(name, 0)) / (1 - BETA1) / kept for name in after}


def _first_moments(output: Path, step: int) -> dict[str, Tensor]:
    if step == 0:
        return {}
    state = load_file(output / "checkpoints" / f"step-{step:08d}" / "optimizer.safetensors")
    return {name.partition("/")[2]: value.double() for name, value in state.items() if name.startswith("exp_avg/")}


def length(tensors: dict[str, Tensor]) -> float:
    return sum(value.square().sum().item() for value in tensors.values()) ** 0.5


def assert_gradients_equal(output: Path, weights: Path, size: Size, tolerance: float) -> None:
    """Compare every step's gradient with the plain loop's from the weights that the step began with."""
    config = json.loads((output / "config.json").read_text())["config"]
    records = [record for record in read_metrics(output) if record["kind"] == "train"]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for step, record in enumerate(records, 1):
        started = output / "checkpoints" / f"step-{step - 1:08d}" / "model.safetensors" if step > 1 else weights
        expected = plain_gradient(config, load_file(started), size, epoch=step - 1)
        found = trained_gradient(output, step, record["grad_norm"])
        distance = length({name: found[name] - expected[name] for name in expected})
        print(f"step {step}: norm {record['grad_norm']:.6f}, distance {distance / length(expected):.1e}")
        assert record["grad_norm"] > MAX_NORM
        assert record["grad_norm"] == pytest.approx(length(expected), rel=tolerance)
        assert distance <= tolerance * length(expected)


def peak_memory(output: Path) -> float:
    return max(record["peak_memory_gb"] for record in read_metrics(output) if "peak_memory_gb" in record)


@pytest.mark.slow
def test_a_step_has_the_gradient_of_a_plain_loop(few_images: Path, weights: Path, tmp_path: Path) -> None:
    output = train(few_images, weights, tmp_path / "run", SMALL, "fp16=None")
    assert_gradients_equal(output, weights, SMALL, 1e-5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_32k_images_have_the_gradient_of_a_plain_loop(many_images: Path, weights: Path, tmp_path: Path) -> None:
    """In float32; the memory is that of two micro-batches a step."""
    large = train(many_images, weights, tmp_path / "large", LARGE, "fp16=None", timeout=1800)
    assert_gradients_equal(large, weights, LARGE, 1e-5)
    few = Size(2 * RANKS * LARGE.micro, LARGE.micro)
    small = train(many_images, weights, tmp_path / "small", few, "fp16=None", timeout=1800)
    print(f"peak memory: {peak_memory(large):.3f} GB, with two micro-batches a step {peak_memory(small):.3f} GB")
    assert peak_memory(large) <= 1.05 * peak_memory(small)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_32k_images_in_bfloat16(many_images: Path, weights: Path, tmp_path: Path) -> None:
    output = train(many_images, weights, tmp_path / "run", LARGE, "fp16.dtype=bfloat16", timeout=1800)
    assert_gradients_equal(output, weights, LARGE, 0.03)
