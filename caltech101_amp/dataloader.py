"""Build the loaders that a config's ``DATA`` asks for, decoding with Pillow in worker processes.

Every loader yields ``(images float32 [B, 3, H, W], labels int64 [B])`` on the device, in whole micro-batches.
Evaluation fills its last batches up with zeros of label -100, which `torch.nn.functional.cross_entropy` ignores.
"""

from collections.abc import Mapping
from typing import Any

import torch

from caltech101_amp.dataset import open_split
from common.augment import UNIFORMS_PER_SAMPLE, CenterCrop, RandomCrop
from common.config import refuse_unused
from common.fingerprint import fingerprint_of
from common.loader import Loader
from common.plan import DataSummary
from common.sampling import EvalSampler, TrainSampler
from common.torchvision_dataloader import TorchvisionReader, default_workers

# keys of DATA for prepared data sets, and for small images, which are held in memory
UNUSED = ("loader", "crop_padding", "autoaugment")


def describe_data(data: Mapping[str, Any]) -> DataSummary:
    """Count samples and classes of the data set, which is downloaded and checked first if it has to be."""
    refuse_unused(data, UNUSED)
    train, test = open_split(data, "train"), open_split(data, "test")
    fingerprint = fingerprint_of([train.fingerprint, test.fingerprint])
    return DataSummary(len(train), len(test), train.num_classes, fingerprint, class_names=train.class_names)


def build_train_loader(
    data: Mapping[str, Any],
    total_batch: int,
    micro_batch: int,
    *,
    image_size: int,
    dp_rank: int,
    dp_size: int,
    seed: int,
    device: torch.device,
) -> Loader:
    """Return the loader of random crops: a new permutation of the training split in every epoch."""
    images = open_split(data, "train")
    sampler = TrainSampler(
        len(images),
        total_batch,
        micro_batch,
        dp_rank=dp_rank,
        dp_size=dp_size,
        seed=seed,
        uniforms=UNIFORMS_PER_SAMPLE,
    )
    crop = RandomCrop(data["crop_scale"], data["crop_ratio"], data["flip"])
    return Loader(sampler, TorchvisionReader(images, crop, **_reader_options(data, image_size, dp_size, device)))


def build_eval_loader(
    data: Mapping[str, Any], batch: int, *, image_size: int, dp_rank: int, dp_size: int, device: torch.device
) -> Loader:
    """Return the loader of centre crops of the test split, each sample exactly once over all ranks."""
    images = open_split(data, "test")
    sampler = EvalSampler(len(images), batch, dp_rank=dp_rank, dp_size=dp_size)
    crop = build_eval_crop(data, image_size)
    return Loader(sampler, TorchvisionReader(images, crop, **_reader_options(data, image_size, dp_size, device)))


def build_eval_crop(data: Mapping[str, Any], image_size: int) -> CenterCrop:
    """Return what evaluation looks at in an image: the centre, ``DATA.eval_crop`` of the short side."""
    return CenterCrop(image_size, short_side=int(image_size / data["eval_crop"]))


def _reader_options(data: Mapping[str, Any], image_size: int, dp_size: int, device: torch.device) -> dict[str, Any]:
    workers = default_workers(dp_size, device) if data["workers"] is None else data["workers"]
    return dict(size=image_size, mean=data["mean"], std=data["std"], workers=workers, device=device, dp_size=dp_size)
