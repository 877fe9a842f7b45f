"""Find the labelled images of a source, whose layout decides which file lists it.

`class_folders` lists class folders, `imagenet_tars` ImageNet as it is downloaded, and `containers`
WebDataset's tars and Hugging Face's parquet files.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from common.data.image_folder import (
    SPLIT_NAME,
    check_class_names,
    find_splits,
    list_folders,
    split_by_class,
)
from common.errors import UserError
from common.files import retry_read
from common.shards.class_folders import list_class_folders
from common.shards.containers import find_containers, list_containers, split_of
from common.shards.imagenet_tars import TRAIN_TAR, list_imagenet_tars
from common.shards.label_table import LabelTable, list_table
from common.shards.source import ImageListing, check_split

VALIDATION_SHARE = 0.2


def list_source(
    root: Path,
    validation_share: float | None = None,
    split: str | None = None,
    *,
    by_count: bool = False,
    table: LabelTable | None = None,
) -> ImageListing:
    """List the images below `root` for training and validation, or those of one `split`.

    Layouts: those in docs/prepare.md, or with `table` any. Labels number the sorted class
    folders from 0, as in torchvision. Of a folder without splits, `split` takes all. Without a
    validation split, `validation_share` of each class becomes it, by name, or `by_count` as in
    earlier versions. Raises `UserError` if the folder has none of the layouts.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; SOURCE is a folder of images, SOURCE/<class>/*")
    folders: Mapping[str, Path] = {}
    if table:
        source, present = retry_read(root, partial(list_table, root, table, split))
    else:
        folders = retry_read(root, partial(find_splits, root))
        source, present = retry_read(root, partial(_list_layout, root, folders, split))
    check_class_names(source.class_names, root)
    unused = ""
    if "test" in present and not split:
        unused = "; test is left out, prepare and evaluate take --split test"
    name = split or "validation"
    if name not in source.splits:
        share = VALIDATION_SHARE if validation_share is None else validation_share
        return _hold_out(source, share, unused, by_count=by_count)
    if validation_share is not None:
        raise UserError(
            f"--validation-share={validation_share}: {root} has a validation split already; drop it"
        )
    description = f"the {name} split"
    if folders:
        description = f"{folders[name].name}/"
    elif "" in present:
        description = "the whole folder"  # which has no splits of its own
    splits = {name: source.splits[name]} if split else source.splits
    return replace(source, splits=splits, validation=description + unused)


def _list_layout(
    root: Path, folders: Mapping[str, Path], split: str | None
) -> tuple[ImageListing, Mapping[str, Path]]:
    """Return the images, and the folder or archive of each split that is there."""
    containers = find_containers(root)
    # By split: one container of each is enough to name it in a message.
    archived = {split_of(container): root / container for container in containers}
    has_train_tar = (root / TRAIN_TAR).is_file()
    if has_train_tar:
        archived.pop("test", None)  # ImageNet's test labels are not published
    classes = {name for name in list_folders(root) if not SPLIT_NAME.fullmatch(name)}
    # Hugging Face keeps parquet files in data/: that is no class.
    is_folder = folders or len(classes - {"data"}) > 1 or not containers
    if is_folder:
        present = folders or {"": root}
        _refuse_half_unpacked(root, folders, archived)
    else:
        present = archived
    check_split(root, present, split)
    if is_folder:
        source = list_class_folders(root, folders, split)
    elif has_train_tar:
        source = list_imagenet_tars(root)
    else:
        source = list_containers(root, containers, split)
    return source, present


def _refuse_half_unpacked(
    root: Path, folders: Mapping[str, Path], archived: Mapping[str, Path]
) -> None:
    """Raise `UserError` for folders beside an archive of a split that none of them is."""
    for name in ("train", "validation"):
        # Without split folders, the class folders are train.
        if name in archived and name not in (folders or ["train"]):
            raise UserError(
                f"{archived[name]}: the {name} split in an archive, beside folders; unpack it into "
                f"{root / name}, or move it away"
            )


def _hold_out(source: ImageListing, share: float, unused: str, *, by_count: bool) -> ImageListing:
    """Make a share of each class of train the validation split."""
    if not share:
        return replace(source, validation="none, as --validation-share=0")
    how = "count" if by_count else "file name"
    names = None if by_count else source.class_names
    train, validation = split_by_class(source.splits["train"], share, names)
    if not validation:
        raise UserError(
            f"{source.root}: no class has images enough to hold {share:.0%} out for validation; "
            "add some, so that one has two, or sort them into train/<class>/* and val/<class>/*"
        )
    total = len(train) + len(validation)
    return replace(
        source,
        splits={"train": train, "validation": validation},
        validation=f"{len(validation):,} of {total:,} images, about {share:.0%} of each class, "
        f"held out of train by {how}{unused}",
        held_out=f"{share:g} by {how}",
    )
