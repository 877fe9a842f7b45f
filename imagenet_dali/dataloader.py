"""Build the loaders that a config's ``DATA`` asks for: DALI on a prepared data set, or Pillow on that or on a folder.

Every loader yields ``(images float32 [B, 3, H, W], labels int64 [B])`` on the device, in whole micro-batches.
Evaluation fills its last batches up with zeros of label -100, which `torch.nn.functional.cross_entropy` ignores.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from common.augment import UNIFORMS_PER_SAMPLE, CenterCrop, RandomCrop
from common.config import refuse_unused
from common.errors import UserError
from common.fingerprint import fingerprint_of
from common.image_folder import FolderSplit
from common.loader import BatchReader, Loader
from common.plan import DataSummary
from common.sampling import EvalSampler, TrainSampler
from common.torchvision_dataloader import TorchvisionReader, default_workers
from imagenet_dali.dataset import Split, open_split
from imagenet_dali.manifest import MANIFEST, data_fingerprint, earlier_fingerprints, read_manifest
from imagenet_dali.sources import list_source

# keys of DATA for small images, which are held in memory
UNUSED = ("download", "crop_padding", "autoaugment")


def describe_data(data: Mapping[str, Any]) -> DataSummary:
    """Count samples and classes of the data set, without reading an image."""
    refuse_unused(data, UNUSED)
    train, validation = open_images(data, "train"), open_images(data, "validation")
    if isinstance(train, Split):
        manifest = read_manifest(train.root)
        fingerprint, earlier = data_fingerprint(manifest), earlier_fingerprints(manifest)
    else:
        fingerprint, earlier = fingerprint_of([train.fingerprint, validation.fingerprint]), ()
    return DataSummary(len(train), len(validation), train.num_classes, fingerprint, earlier, train.class_names)


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
    images = open_images(data, "train")
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
    return Loader(sampler, _build_reader(data, images, crop, micro_batch, image_size, dp_size, device))


def build_eval_loader(
    data: Mapping[str, Any], batch: int, *, image_size: int, dp_rank: int, dp_size: int, device: torch.device
) -> Loader:
    """Return the loader of centre crops of the validation split, each sample exactly once over all ranks."""
    images = open_images(data, "validation")
    sampler = EvalSampler(len(images), batch, dp_rank=dp_rank, dp_size=dp_size)
    crop = build_eval_crop(data, image_size)
    return Loader(sampler, _build_reader(data, images, crop, batch, image_size, dp_size, device))


def build_eval_crop(data: Mapping[str, Any], image_size: int) -> CenterCrop:
    """Return what evaluation looks at in an image: the centre, ``DATA.eval_crop`` of the short side."""
    return CenterCrop(image_size, short_side=int(image_size / data["eval_crop"]))


def open_images(data: Mapping[str, Any], split: str) -> Split | FolderSplit:
    """Open a split of the data set at ``DATA.root``; raise `UserError` saying what is wrong with it.

    An image folder that was not prepared serves torchvision only.
    """
    root = Path(data["root"])
    if data["loader"] == "dali" or (root / MANIFEST).is_file():
        return open_split(root, split)
    source = list_source(root)
    if split not in source.splits:
        raise UserError(f"DATA.root={root} has no {split} split: add {root / split}/<class>/*")
    return FolderSplit(root, source.class_names, source.splits[split])


def _build_reader(
    data: Mapping[str, Any],
    images: Split | FolderSplit,
    crop: RandomCrop | CenterCrop,
    batch: int,
    image_size: int,
    dp_size: int,
    device: torch.device,
) -> BatchReader:
    options = {"size": image_size, "mean": data["mean"], "std": data["std"], "device": device}
    workers = default_workers(dp_size, device) if data["workers"] is None else data["workers"]
    if data["loader"] == "torchvision":
        return TorchvisionReader(images, crop, workers=workers, dp_size=dp_size, **options)
    # DALI takes half a second to import
    from imagenet_dali.imagenet_dali_dataloader import DaliReader

    return DaliReader(images, crop, batch=batch, threads=max(1, workers), **options)
