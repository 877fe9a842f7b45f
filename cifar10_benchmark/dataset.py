"""CIFAR-10 in memory, from torchvision's files, its archive, the network, or a folder of images."""

import functools
import hashlib
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torchvision.datasets import CIFAR10

from common.data.download import fetch
from common.data.image_folder import list_splits
from common.data.image_loaders import load_image
from common.data.image_split import FolderSplit
from common.data.workers import WorkerPool
from common.errors import UserError
from common.files import Values, fingerprint_of
from common.hardware import rank_cores
from common.process import at_end

DOWNLOAD = "CIFAR-10 (170 MB)"
BATCHES = CIFAR10.base_folder  # cifar-10-batches-py
PART = 1000  # images that a process decodes at a time


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
        # Of the decoded images: it does not matter where and how they are stored.
        return fingerprint_of(
            hashlib.sha256(array.data).hexdigest() for array in (*self.train, *self.test)
        )


def open_images(data: Values) -> DataSet:
    """Read the data set at ``DATA.root``, once.

    With ``DATA.download`` a missing one is downloaded. Raises `UserError` naming the file or folder
    that is missing or wrong.
    """
    return _open(Path(data["root"]), data["download"])


# Cached: the description of the data and both loaders ask for it.
@functools.cache
def _open(root: Path, allow_download: bool) -> DataSet:
    """Read a folder of images, or CIFAR-10 as torchvision does."""
    at_end(_open.cache_clear)  # the files may change until the next main function
    if (root / "train").is_dir():
        folders = {"train": root / "train", "test": root / "test"}
        classes, files = list_splits(root, folders)
        train = _decode(FolderSplit(root, classes, files["train"]))
        test = _decode(FolderSplit(root, classes, files["test"]))
        return DataSet(classes, train, test)
    if not (root / BATCHES).is_dir():
        fetch(
            root / BATCHES,
            root / CIFAR10.filename,
            CIFAR10.url,
            CIFAR10.tgz_md5,
            allow_download,
            needed=f"{BATCHES}/, {CIFAR10.filename} or train/<class>/*",
            description=DOWNLOAD,
        )
    try:
        # MD5 sums are verified before anything is unpickled: a pickle may run code.
        train = CIFAR10(root, train=True)
        test = CIFAR10(root, train=False)
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"{root / BATCHES}: a file is missing, or its MD5 is not CIFAR-10's; remove it and "
            f"unpack {CIFAR10.filename} again"
        ) from error
    return DataSet(
        train.classes,
        _to_images(train.data, train.targets),
        _to_images(test.data, test.targets),
    )


def _decode(split: FolderSplit) -> Images:
    """Decode square images of one size, with all cores."""
    first, _ = load_image(split, 0)
    parts = [range(start, min(start + PART, len(split))) for start in range(0, len(split), PART)]
    # A part takes less time than to fork processes.
    workers = min(rank_cores(), len(parts)) if len(parts) > 1 else 0
    pool = WorkerPool(partial(_decode_part, split, first.shape), workers)
    with closing(pool):
        pool.start()
        images = np.concatenate([*pool.map(iter(parts))])
    return _to_images(images, split.labels)


def _decode_part(split: FolderSplit, first: Sequence[int], part: range) -> np.ndarray:
    """Return a ``part`` of the images, uint8 [B, Y, X, 3], squares as high as ``first``."""
    side = first[0]
    images = np.empty((len(part), side, side, 3), np.uint8)
    for row, index in enumerate(part):
        image, _ = load_image(split, index)
        height, width, _ = image.shape
        # They become one array, and the model takes squares.
        if (height, width) != (side, side):
            raise UserError(
                f"{split.path(index)}: {width} x {height} pixels, the first of the split has "
                f"{first[1]} x {side}; make all images squares of one size"
            )
        images[row] = image
    return images


def _to_images(images_BYXC: np.ndarray, labels: Sequence[int] | np.ndarray) -> Images:
    """Return a split with its channels first."""
    # Contiguous: hashlib, for the fingerprint, takes no strided array.
    images_BCYX = np.ascontiguousarray(images_BYXC.transpose(0, 3, 1, 2))
    return Images(images_BCYX, np.array(labels, np.int64))
