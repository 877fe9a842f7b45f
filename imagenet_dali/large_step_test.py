"""Steps of vit-b16.py with a small ViT: DALI, Mixup, LAMB, clipping; compared with plain loops of timm's model.

`pytest -m slow imagenet_dali/large_step_test.py` takes steps of 64 and of 32,768 images, the latter also in bfloat16.
"""

import functools
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from common.config.load import load_config
from common.config.model_arguments import timm_arguments
from common.data.batch_augment import BatchAugment
from common.metrics.writers import read_metrics
from common.model.vit import build_model
from imagenet_dali import prepare
from imagenet_dali.dataloader import build_train_loader
from imagenet_dali.testing import run

# Dropout is off, because its masks depend on how a batch is split.
MODEL = dict(image_size=16, patch_size=8, width=32, depth=2, heads=2, mlp_ratio=2.0, num_classes=10, dropout=0.0)
RANKS = 2
MAX_NORM = 0.05  # below every gradient's norm here, so that clipping acts
BETA1 = 0.9
DIFFERENT = 509  # images; the others are links to them, with all labels; every crop is another one


class Size(NamedTuple):
    """Images of an optimizer step and of a process's micro-batch, and how many steps are taken."""

    total: int
    micro: int
    steps: int


SMALL, LARGE = Size(64, 8, 2), Size(32 * 1024, 256, 1)  # the large one in the recipe's own micro-batches


def prepare_images(folder: Path, count: int) -> Path:
    """Prepare ``count`` JPEGs of 20 x 20 pixels in ten classes, and a few for validation."""
    random = np.random.default_rng(0)
    for number in range(count + 50):
        path = folder / "images" / ("train" if number < count else "validation") / str(number % 10) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        original = folder / f"{number % DIFFERENT}.jpg"
        if number < DIFFERENT:
            small = Image.fromarray(random.integers(0, 256, (4, 4, 3), np.uint8))
            small.resize((20, 20), Image.Resampling.BILINEAR).save(file := io.BytesIO(), "JPEG")
            original.write_bytes(file.getvalue())
        os.link(original, path)
    prepare.main([str(folder / "images"), str(folder / "shards"), "--workers", "2"])
    return folder / "shards"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(build_model(**MODEL).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_images(tmp_path_factory.mktemp("data"), LARGE.total + 1000)


def train(data: Path, weights: Path, output: Path, size: Size, *settings: str) -> Path:
    """Train a few optimizer steps of the vit-b16 recipe as a user does; return the run's folder."""
    settings = (
        *(f"MODEL.{key}={value}" for key, value in MODEL.items()),
        *(f"TOTAL_BATCH_SIZE={size.total}", f"MICRO_BATCH_SIZE={size.micro}", f"MAX_STEPS={size.steps}"),
        *(f"clip_grad_norm={MAX_NORM}", "CHECKPOINT_EVERY=1", "LOG.every=1", "LOG.tensorboard=False"),
        *settings,
    )
    torchrun = f"python -m torch.distributed.run --standalone --nproc_per_node {RANKS}"
    words = " ".join(f"--set {setting}" for setting in settings)
    command = f"{torchrun} train_dali.py --config vit-b16.py --init {weights} --output {output} {words}"
    run(command, timeout=1800, DATA=str(data))
    return output


def micro_batches(data: Path, size: Size, step: int) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield what all ranks train on in a step, one rank after the other."""
    config = load_config("vit-b16", [f"DATA.root={data}"])
    for rank in range(RANKS):
        place = dict(image_size=MODEL["image_size"], device=torch.device("cpu"), dp_rank=rank, dp_size=RANKS)
        loader = build_train_loader(config["DATA"], size.total, size.micro, seed=config["SEED"], **place)
        loader = BatchAugment(loader, mixup=config["MIXUP"], cutmix=0.0, erasing=0.0, seed=config["SEED"])
        loader.load_state_dict({"epoch": 0, "samples": (step - 1) * size.total})
        batches = iter(loader)
        for _ in range(size.total // RANKS // size.micro):
            yield next(batches)
        loader.close()


@functools.cache  # the float32 and bfloat16 runs start from the same weights
def plain_gradient(data: Path, weights: Path, size: Size, step: int) -> dict[str, Tensor]:
    """Return the gradient of the mean loss of a step, of timm's model in float64, one micro-batch after the other."""
    model = VisionTransformer(**timm_arguments(**MODEL))
    model.load_state_dict(load_file(weights), strict=True)
    model.double()
    images_seen = 0
    for images, labels in micro_batches(data, size, step):
        first, second = (F.one_hot(labels[key], MODEL["num_classes"]).double() for key in ("target", "other"))
        share = labels["share"].double()
        blend = share * first + (1 - share) * second
        (-(blend * model(images.double()).log_softmax(1)).sum() / size.total).backward()
        images_seen += len(images)
    assert images_seen == size.total
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def trained_gradient(output: Path, step: int, norm: float) -> dict[str, Tensor]:
    """Return the gradient of ``step`` before clipping, from LAMB's first moments in the checkpoints."""
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


def assert_gradients_equal(output: Path, data: Path, weights: Path, size: Size, tolerance: float) -> None:
    """Compare every step's gradient with the plain loop's from the weights that the step began with."""
    records = [record for record in read_metrics(output) if record["kind"] == "train"]
    assert [record["step"] for record in records] == list(range(1, size.steps + 1))
    for step, record in enumerate(records, 1):
        started = output / "checkpoints" / f"step-{step - 1:08d}" / "model.safetensors" if step > 1 else weights
        expected = plain_gradient(data, started, size, step)
        found = trained_gradient(output, step, record["grad_norm"])
        distance = length({name: found[name] - expected[name] for name in expected})
        print(f"step {step}: norm {record['grad_norm']:.6f}, distance {distance / length(expected):.1e}")
        assert record["grad_norm"] > MAX_NORM
        assert record["grad_norm"] == pytest.approx(length(expected), rel=tolerance)
        assert distance <= tolerance * length(expected)


def peak_memory(output: Path) -> float:
    return max(record["peak_memory_gb"] for record in read_metrics(output) if "peak_memory_gb" in record)


@pytest.mark.slow
def test_a_step_has_the_gradient_of_a_plain_loop(data: Path, weights: Path, tmp_path: Path) -> None:
    output = train(data, weights, tmp_path / "run", SMALL, "fp16=None")
    assert_gradients_equal(output, data, weights, SMALL, 1e-5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_32k_images_have_the_gradient_of_a_plain_loop(data: Path, weights: Path, tmp_path: Path) -> None:
    """In float32; the memory is that of two micro-batches a step."""
    large = train(data, weights, tmp_path / "large", LARGE, "fp16=None")
    assert_gradients_equal(large, data, weights, LARGE, 1e-5)
    few = LARGE._replace(total=2 * RANKS * LARGE.micro)
    small = train(data, weights, tmp_path / "small", few, "fp16=None")
    print(f"peak memory: {peak_memory(large):.3f} GB, with two micro-batches a step {peak_memory(small):.3f} GB")
    assert peak_memory(large) <= 1.05 * peak_memory(small)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_32k_images_in_bfloat16(data: Path, weights: Path, tmp_path: Path) -> None:
    output = train(data, weights, tmp_path / "run", LARGE, "fp16.dtype=bfloat16")
    assert_gradients_equal(output, data, weights, LARGE, 0.03)
