"""The loaders of a prepared data set, which DALI or Pillow decodes, or of an image folder, which Pillow decodes."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config.load import refuse_unused
from common.config.plan import DataSummary
from common.data import image_loaders
from common.data.block_cache import BlockCache
from common.data.crops import Crop
from common.data.image_folder import FolderSplit
from common.data.loader import BatchReader, Loader
from common.errors import UserError
from common.files import fingerprint_of
from common.object_store import StorePath, as_path
from common.task import Task
from imagenet_dali.dataset import Split, open_split
from imagenet_dali.manifest import MANIFEST, PARTIAL, data_fingerprint, read_manifest
from imagenet_dali.sources import list_source


def describe_data(data: Mapping[str, Any]) -> DataSummary:
    """Count samples and classes of the data set, without reading an image."""
    refuse_unused(data, (*image_loaders.UNUSED, "download"))
    train, validation = open_images(data, "train"), open_images(data, "validation")
    if isinstance(train, Split):
        manifest = read_manifest(train.root)
        fingerprint = data_fingerprint(manifest)
        earlier = tuple(repair["fingerprint"] for repair in manifest.get("repairs", ()))
    else:
        fingerprint, earlier = fingerprint_of([train.fingerprint, validation.fingerprint]), ()
    summary = DataSummary(len(train), len(validation), train.num_classes, fingerprint, earlier, train.class_names)
    if isinstance(train, Split):
        summary = replace(summary, shard_bytes=train.nbytes, is_shuffled=train.is_shuffled)
    if data.get("order") == "blocks" and not (summary.shard_bytes and summary.is_shuffled):
        fault = "has shards sorted by class, so batches would be too" if summary.shard_bytes else "has no shards"
        raise UserError(
            f"DATA.order='blocks': DATA.root={data['root']} {fault}; `python -m imagenet_dali.prepare` makes shuffled "
            "ones, or use DATA.order='random'"
        )
    return summary


def build_train_loader(data: Mapping[str, Any], total_batch: int, micro_batch: int, **place: Any) -> Loader:
    """Return the loader of the training split; ``place`` is as in `image_loaders.build_train_loader`."""
    images = open_images(data, "train")
    place |= _reader(data) | (_blocks(images, data) if data["order"] == "blocks" else {})
    return image_loaders.build_train_loader(images, data, total_batch, micro_batch, **place)  # pyright: ignore[reportArgumentType]


def build_eval_loader(data: Mapping[str, Any], batch: int, **place: Any) -> Loader:
    """Return the loader of the validation split; ``place`` is as in `image_loaders.build_eval_loader`."""
    images = open_images(data, "validation")
    place |= _reader(data) | _blocks(images, data)
    return image_loaders.build_eval_loader(images, data, batch, **place)  # pyright: ignore[reportArgumentType]


def open_images(data: Mapping[str, Any], split: str) -> Split | FolderSplit:
    """Open a split of the data set at ``DATA.root``; raise `UserError` with what is wrong with it.

    Only the torchvision loader reads image folders that were not prepared.
    """
    root = as_path(data["root"])
    is_remote = isinstance(root, StorePath)
    # the latter while it is prepared
    if data["loader"] == "dali" or is_remote or any((root / name).exists() for name in (MANIFEST, PARTIAL)):
        args = root, split, data.get("cache"), data.get("cache_gb", 0)
        return _open_remote(*args) if is_remote else _open(*args)
    if data.get("cache"):
        raise UserError(
            f"DATA.cache={data['cache']}: of a folder of images nothing is cached; leave it out, or make shards with "
            "`python -m imagenet_dali.prepare`"
        )
    splits = _open_folder(root)
    if split not in splits:
        raise UserError(f"DATA.root={root} has no {split} split: add {root / split}/<class>/*")
    return splits[split]


@functools.cache  # listing a million files takes 12 s
def _open_folder(root: Path) -> dict[str, FolderSplit]:
    source = list_source(root)
    if source.places:
        raise UserError(f"DATA.root={root}: tars and parquet files are read by `python -m imagenet_dali.prepare` only")
    return {split: FolderSplit(root, source.class_names, files) for split, files in source.splits.items()}


def _open(root: Path, split: str, folder: str | None, cache_gb: float) -> Split:
    cache = _open_cache(Path(folder).expanduser().absolute(), round(1e9 * cache_gb)) if folder else None
    return open_split(root, split, cache)


_open_cache = functools.cache(BlockCache)  # which warns once
_open_remote = functools.cache(_open)  # some ten requests; and shards must not change after the first


def _blocks(images: Split | FolderSplit, data: Mapping[str, Any]) -> dict[str, Any]:
    return {"blocks": images.block_bounds(round(1e6 * data["block"]))} if isinstance(images, Split) else {}


def _reader(data: Mapping[str, Any]) -> dict[str, Any]:
    return {"build_reader": _read_with_dali} if data["loader"] == "dali" else {}


def _read_with_dali(images: Split, crop: Crop, *, workers: int, dp_size: int, **options: Any) -> BatchReader:
    # DALI takes half a second to import
    from imagenet_dali.imagenet_dali_dataloader import DaliReader

    return DaliReader(images, crop, threads=max(1, workers), **options)


TASK = Task(
    name="imagenet_dali",
    script="imagenet_dali/train_dali.py",
    recipe="vit-b16",
    recipes=("vit-", "vit_s16", "deit3", "quickstart"),
    describe=describe_data,
    build_train_loader=build_train_loader,
    build_eval_loader=build_eval_loader,
    build_eval_crop=image_loaders.build_eval_crop,
    train_samples=1_281_167,
)
