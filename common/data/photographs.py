"""Loaders of photographs, which are decoded, cropped and augmented as they are read.

Every loader yields ``(images float32 [B, 3, H, W], labels int64 [B])`` on the device, in whole micro-batches.
Evaluation fills its last batches up with zeros of label -100, which `torch.nn.functional.cross_entropy` ignores.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from common.data.crops import UNIFORMS_PER_SAMPLE, CenterCrop, Crop, RandomCrop, SimpleCrop
from common.data.loader import BatchReader, Loader
from common.data.micro_batches import EvalSampler, TrainSampler
from common.data.torchvision_dataloader import Augment, ImageSplit, TorchvisionReader
from common.hardware import rank_cores

# keys of DATA for small images, which are held in memory
UNUSED = ("crop_padding", "autoaugment")
# and for shards
SHARDS_ONLY = ("order", "block", "window", "cache", "cache_gb")


# Builds what reads ``images``; of the keywords those of `TorchvisionReader`, and ``batch``, its largest draw.
BuildReader = Callable[..., BatchReader]


def _read_with_torchvision(images: ImageSplit, crop: Crop, *, batch: int, **options: Any):
    del batch
    return TorchvisionReader(images, crop, **options)


def build_train_loader(
    images: ImageSplit,
    data: Mapping[str, Any],
    total_batch: int,
    micro_batch: int,
    *,
    image_size: int,
    dp_rank: int,
    dp_size: int,
    seed: int,
    device: torch.device,
    blocks: np.ndarray | None = None,
    build_reader: BuildReader = _read_with_torchvision,
) -> Loader:
    """Return the loader of random crops: a new permutation of ``images``, or of their ``blocks``, in every epoch."""
    augment = _build_rand_augment(data)
    uniforms = UNIFORMS_PER_SAMPLE + (augment.uniforms if augment else 0)
    draws = dict(dp_rank=dp_rank, dp_size=dp_size, seed=seed, uniforms=uniforms, repeats=data["repeats"])
    sampler = TrainSampler(len(images), total_batch, micro_batch, **draws, blocks=blocks, window=data["window"])
    crop = RandomCrop(data["crop_scale"], data["crop_ratio"], data["flip"], data["interpolation"])
    if data["crop"] == "simple":
        crop = SimpleCrop(image_size, data["flip"], data["interpolation"])
    options = _reader_options(data, image_size, dp_size, device)
    return Loader(sampler, build_reader(images, crop, augment=augment, batch=micro_batch, **options))


def build_eval_loader(
    images: ImageSplit,
    data: Mapping[str, Any],
    batch: int,
    *,
    image_size: int,
    dp_rank: int,
    dp_size: int,
    device: torch.device,
    blocks: np.ndarray | None = None,
    build_reader: BuildReader = _read_with_torchvision,
) -> Loader:
    """Return the loader of centre crops of ``images``, each sample exactly once over all ranks."""
    sampler = EvalSampler(len(images), batch, dp_rank=dp_rank, dp_size=dp_size, blocks=blocks)
    crop = build_eval_crop(data, image_size)
    options = _reader_options(data, image_size, dp_size, device)
    return Loader(sampler, build_reader(images, crop, augment=None, batch=batch, **options))


def build_eval_crop(data: Mapping[str, Any], image_size: int) -> CenterCrop:
    """Return the crop of evaluation: the centre, ``DATA.eval_crop`` of the short side."""
    return CenterCrop(image_size, int(image_size / data["eval_crop"]), data["interpolation"])


def _build_rand_augment(data: Mapping[str, Any]) -> Augment | None:
    if data["randaugment"] is None:
        return None
    from common.data.auto_augment import RandAugment  # torchvision takes a second to import

    return RandAugment(*data["randaugment"])


def _reader_options(data: Mapping[str, Any], image_size: int, dp_size: int, device: torch.device) -> dict[str, Any]:
    workers = rank_cores() if data["workers"] is None else data["workers"]
    return dict(size=image_size, mean=data["mean"], std=data["std"], workers=workers, device=device, dp_size=dp_size)
