"""CIFAR-10 in memory, from torchvision's files, its archive, the network, or a folder of images."""

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.data.corrupt_images import reason_of
from common.data.download import fetch
from common.data.image_folder import FolderSplit, decode_image, list_classes, list_folders
from common.errors import UserError
from common.files import fingerprint_of, read_bytes

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
MD5 = "c58f30108f718f92721af3b95e74349a"
DOWNLOAD = "CIFAR-10 (170 MB)"
TRAIN_SAMPLES = 50_000
ARCHIVE = "cifar-10-python.tar.gz"
MAX_BATCH = 1 << 25  # bytes; CIFAR-10's have 31 million
BATCHES = "cifar-10-batches-py"
MD5_OF_BATCHES = {
    "train": {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    "test": {"test_batch": "40351d587109b95175f43aff81a1287e"},
}


class Images(NamedTuple):
    """A split in memory: ``images`` uint8 [N, 3, Y, X] in RGB, ``labels`` int64 [N]."""

    images: np.ndarray
    labels: np.ndarray


class CifarBatches:
    """The unpacked archive: a pickled dict of 10,000 images in each file."""

    num_classes = 10
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def count(self, split: str) -> int:
        """Return the number of images in the split."""
        return len(self.load(split).labels)

    @property
    def fingerprint(self) -> str:
        """A checksum over the images and labels."""
        return fingerprint_of(
            hashlib.sha256(array.data).hexdigest() for split in MD5_OF_BATCHES for array in self.load(split)
        )

    def load(self, split: str) -> Images:
        """Read the split; raise `UserError` naming a file that is missing or differs from CIFAR-10's."""
        parts = [self._load_batch(self.folder / name, md5) for name, md5 in MD5_OF_BATCHES[split].items()]
        return Images(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _load_batch(self, path: Path, md5: str) -> Images:
        remedy = f"remove {self.folder} and unpack {ARCHIVE} again"
        try:
            content = read_bytes(path, MAX_BATCH)
        except UserError as error:
            raise UserError(f"{error}; {remedy}") from error
        if hashlib.md5(content).hexdigest() != md5:  # nothing else is unpickled: a pickle may run code
            raise UserError(f"{path}: not CIFAR-10's file, its MD5 differs; {remedy}")
        batch = pickle.loads(content, encoding="bytes")
        return Images(batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[b"labels"], np.int64))


class ImageFolder:
    """``train/<class>/*`` and ``test/<class>/*``: square images of one size; labels index the sorted class folders."""

    def __init__(self, root: Path) -> None:
        self.root, self.class_names = root, list_folders(root / "train")
        self.num_classes = len(self.class_names)
        if self.num_classes < 2:
            raise UserError(f"{root / 'train'}: {self.num_classes} class folders, at least 2 are needed")
        self._splits = {split: self._open(root / split) for split in ("train", "test")}

    def _open(self, folder: Path) -> FolderSplit:
        names = list_folders(folder) if folder.is_dir() else []
        if names != self.class_names:
            odd = min(set(names) ^ set(self.class_names))
            raise UserError(f"{folder / odd}: {folder.name}/ needs train's class folders; add or remove this one")
        files = list_classes(self.root, folder, names)
        if empty := set(range(len(names))) - {label for _, label in files}:
            path = folder / names[min(empty)]
            raise UserError(f"{path}: no images; fill the folder, or remove it in train/ and test/")
        return FolderSplit(self.root, names, files)

    def count(self, split: str) -> int:
        """Return the number of images in the split."""
        return len(self._splits[split])

    @property
    def fingerprint(self) -> str:
        """A checksum over paths, labels and sizes, independent of the folder's location."""
        return fingerprint_of(split.fingerprint for split in self._splits.values())

    def load(self, split: str) -> Images:
        """Decode the split; raise `UserError` naming an image that does not decode or is of another size."""
        opened = self._splits[split]
        images, labels = [], []
        for index in range(len(opened)):
            content, label = opened.read(index)
            try:
                image = decode_image(content)
            except Exception as error:  # decoders raise a dozen unrelated types for damaged files
                raise opened.fault(index, reason_of(error)) from error
            images.append(image)
            labels.append(label)
            (height, width, _), (first_height, first_width, _) = image.shape, images[0].shape
            if not height == width == first_height == first_width:
                raise UserError(
                    f"{opened.path(index)}: {width} x {height} pixels, the first of {self.root / split} has "
                    f"{first_width} x {first_height}; make all images squares of one size"
                )
        return Images(np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2)), np.array(labels, np.int64))


def open_images(data: Mapping[str, Any]) -> CifarBatches | ImageFolder:
    """Open the data set at ``DATA.root``; download it first if it is missing and ``DATA.download`` is set."""
    root = Path(data["root"])
    if (root / "train").is_dir():
        return ImageFolder(root)
    if not (root / BATCHES).is_dir():
        needed = f"{BATCHES}/, {ARCHIVE} or train/<class>/*"
        fetch(root / BATCHES, root / ARCHIVE, URL, MD5, data["download"], needed, DOWNLOAD)
    return CifarBatches(root / BATCHES)
