"""The loaders of prepared data sets (DALI or simplejpeg) and image folders (simplejpeg, Pillow)."""

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.config.plan import DataSummary
from common.data import image_loaders
from common.data.image_split import FolderSplit, ImageSplit
from common.data.loader import Loader
from common.errors import UserError
from common.files import Values
from common.launchers import is_first_process
from common.process import at_end
from common.shards.dataset import MANIFEST, PARTIAL, open_split
from common.shards.find_images import list_source
from common.shards.label_table import LabelTable
from common.task import Task, describe_splits, refuse_unused
from common.text import print_wrapped


def describe_data(data: Values) -> DataSummary:
    """Count samples and classes of the data set, or of ``data["eval_split"]`` alone.

    No image is read.
    """
    refuse_unused(data, (*image_loaders.UNUSED, "download"))
    if data["loader"] == "dali" and not has_dali():
        raise UserError(
            "DATA.loader='dali': NVIDIA DALI is not installed; add --set DATA.loader=torchvision, "
            "or install nvidia-dali-cuda130"
        )
    # Set by evaluate alone: without training images there is nothing more to check.
    split = data.get("eval_split")
    if split:
        images = open_images(data, split)
        return DataSummary(
            train_samples=0,
            eval_samples=len(images),
            num_classes=len(images.class_names),
            fingerprint=images.fingerprint,
            class_names=images.class_names,
            validation=images.description,
        )
    randaugment = data.get("randaugment")
    if data["loader"] == "dali" and isinstance(randaugment, str):
        raise UserError(
            f"DATA.randaugment={randaugment!r} is timm's, on the CPU: add --set "
            "DATA.loader=torchvision"
        )
    train = open_images(data, "train")
    validation = open_images(data, "validation")
    summary = describe_splits(
        train,
        validation,
        shard_bytes=train.span_bytes(0, len(train)),
        is_shuffled=train.is_shuffled,
        held_out=validation.held_out,
        made_from=train.made_from,
    )
    if data.get("order") == "blocks":
        _check_blocks(data, summary)
    return summary


def _check_blocks(data: Values, summary: DataSummary) -> None:
    """Raise `UserError` for a data set that cannot be read in block order."""
    if summary.shard_bytes and summary.is_shuffled:
        return
    fault = "has no shards"
    if summary.shard_bytes:
        fault = "has shards sorted by class, so batches would be too"
    raise UserError(
        f"DATA.order='blocks': DATA.root={data['root']} {fault}; `python scripts/prepare.py` "
        "makes shuffled ones, or use DATA.order='random'"
    )


def has_dali() -> bool:
    """Return whether DALI is installed; it is not imported, which takes half a second."""
    # Without a package `nvidia` the second would raise.
    return bool(find_spec("nvidia") and find_spec("nvidia.dali"))


def build_train_loader(
    data: Values,
    total_batch: int,
    micro_batch: int,
    *,
    order: str | None = None,
    **options: Any,
) -> Loader:
    """Return the loader of the training split in the plan's ``order``.

    ``options`` are those of `image_loaders.build_train_loader`.
    """
    images = open_images(data, "train")
    options |= _options(images, data, options["device"].type, in_blocks=order == "blocks")
    return image_loaders.build_train_loader(images, data, total_batch, micro_batch, **options)


def build_eval_loader(data: Values, batch: int, **options: Any) -> Loader:
    """Return the loader of validation, or of ``data["eval_split"]``.

    ``options`` are those of `image_loaders.build_eval_loader`.
    """
    images = open_images(data, data.get("eval_split", "validation"))
    # in blocks, which need the fewest reads: evaluation keeps the order anyway
    options |= _options(images, data, options["device"].type, in_blocks=True)
    return image_loaders.build_eval_loader(images, data, batch, **options)


def open_images(data: Values, split: str) -> ImageSplit:
    """Open a split of the data set at ``DATA.root``; raise `UserError` with what is wrong with it.

    Only the torchvision loader reads image folders that were not prepared.
    """
    root = Path(data["root"])
    labels = data["labels"]
    # PARTIAL: a data set whose preparation was stopped is refused, not read as a folder.
    if data["loader"] == "dali" or any((root / name).exists() for name in (MANIFEST, PARTIAL)):
        if labels or data["columns"]:
            raise UserError(
                f"DATA.labels={labels}, DATA.columns={data['columns']}: of folders that "
                "DATA.loader='torchvision' reads; for shards, prepare takes --labels: leave it out"
            )
        return open_split(root, split)
    table = LabelTable(root / labels, data["columns"]) if labels else None
    return _open_folder(root, data.get("eval_split"), data["split"] == "counted", table)[split]


# Cached, because listing a million files takes 12 s.
@functools.cache
def _open_folder(
    root: Path, split: str | None, by_count: bool, table: LabelTable | None
) -> dict[str, FolderSplit]:
    """Return the splits of a folder of images, or one of them, and say what was found."""
    at_end(_open_folder.cache_clear)  # the files may change until the next main function
    source = list_source(root, split=split, by_count=by_count, table=table)
    if source.positions:
        raise UserError(
            f"DATA.root={root}: tars and parquet files are read by `python scripts/prepare.py` only"
        )
    if is_first_process():
        print_wrapped(source.summary)
    splits = {}
    for name, files in source.splits.items():
        splits[name] = FolderSplit(
            root, source.class_names, files, source.validation, source.held_out
        )
    return splits


def _options(images: ImageSplit, data: Values, device: str, in_blocks: bool) -> dict[str, Any]:
    """Return what reads the images, and the bounds of the blocks that are read at once."""
    options: dict[str, Any] = {}
    if data["loader"] == "dali":
        # Importing DALI takes half a second.
        from imagenet_dali.imagenet_dali_dataloader import DaliReader, decodes_windows

        options["build_reader"] = DaliReader
        # This loads DALI's nvJPEG before torchvision's, which is older and would be used instead.
        decodes_windows(device)
    if in_blocks:
        options["block_bounds"] = images.block_bounds(round(1e6 * data["block"]))
    return options


TASK = Task(
    name="imagenet_dali",
    script="imagenet_dali/train_dali.py",
    recipe="vit-b16",
    recipes=("vit-", "vit_s16", "deit3", "convnext", "dinov2", "quickstart"),
    describe=describe_data,
    build_train_loader=build_train_loader,
    build_eval_loader=build_eval_loader,
    build_eval_crop=image_loaders.build_eval_crop,
    train_samples=1_281_167,  # assumed by a dry run without the data
    has_splits=True,
)
