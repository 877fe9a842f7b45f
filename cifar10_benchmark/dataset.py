"""CIFAR-10 in memory, from torchvision's files, its archive, the network, or a folder of images."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torchvision.datasets import CIFAR10

from common.data.download import fetch
from common.data.image_folder import list_splits
from common.data.image_loaders import load_image
from common.data.image_split import FolderSplit
from common.errors import UserError
from common.files import fingerprint_of

DOWNLOAD = "CIFAR-10 (170 MB)"
BATCHES = CIFAR10.base_folder


class Images(NamedTuple):
    """A split in memory: ``images`` uint8 [N, 3, Y, X] in RGB, ``labels`` int64 [N]."""

    images: np.ndarray
    labels: np.ndarray


class DataSet(NamedTuple):
    """Both splits, and the names of their classes."""

    class_names: Sequence[str]
    train: Images
    test: Images

    @property
    def fingerprint(self) -> str:
        """A checksum over the images and labels."""
        return fingerprint_of(
            hashlib.sha256(array.data).hexdigest() for array in (*self.train, *self.test)
        )


def open_images(data: Mapping[str, Any]) -> DataSet:
    """Read the data set at ``DATA.root``, once; download it first if it is missing and
    ``DATA.download`` is set.

    Raises `UserError` naming the file or folder that is missing or wrong.
    """
    return _open(Path(data["root"]), data["download"])


@functools.cache
def _open(root: Path, allow_download: bool) -> DataSet:
    if (root / "train").is_dir():
        classes, folders = list_splits(root, {split: root / split for split in ("train", "test")})
        return DataSet(
            classes, *(_decode(FolderSplit(root, classes, files)) for files in folders.values())
        )
    if not (root / BATCHES).is_dir():
        archive, needed = (
            root / CIFAR10.filename,
            f"{BATCHES}/, {CIFAR10.filename} or train/<class>/*",
        )
        fetch(
            root / BATCHES, archive, CIFAR10.url, CIFAR10.tgz_md5, allow_download, needed, DOWNLOAD
        )
    try:  # MD5 sums are verified before anything is unpickled: a pickle may run code
        train, test = (CIFAR10(root, train=is_train) for is_train in (True, False))
    except (RuntimeError, OSError) as error:
        remedy = f"remove it and unpack {CIFAR10.filename} again"
        raise UserError(
            f"{root / BATCHES}: a file is missing, or its MD5 is not CIFAR-10's; {remedy}"
        ) from error
    return DataSet(
        train.classes, *(_to_images(split.data, split.targets) for split in (train, test))
    )


def _decode(split: FolderSplit) -> Images:
    """Decode square images of one size."""
    images, labels = [], []
    for index in range(len(split)):
        image, label = load_image(split, index)
        images.append(image)
        labels.append(label)
        (height, width, _), first = image.shape, images[0].shape
        if height != width or image.shape != first:
            raise UserError(
                f"{split.path(index)}: {width} x {height} pixels, the first of the split has "
                f"{first[1]} x {first[0]}; make all images squares of one size"
            )
    return _to_images(np.stack(images), labels)


def _to_images(images_BYXC: np.ndarray, labels: Sequence[int]) -> Images:
    return Images(
        np.ascontiguousarray(images_BYXC.transpose(0, 3, 1, 2)), np.array(labels, np.int64)
    )
