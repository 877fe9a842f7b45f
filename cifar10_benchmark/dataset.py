"""CIFAR-10 in memory, from torchvision's files, its archive, the network, or a folder of images."""

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simplejpeg

from common.data.corrupt_images import reason_of
from common.data.download import check_md5, download, extract
from common.data.fingerprint import fingerprint_of
from common.data.image_folder import check_pixels, open_image
from common.errors import UserError
from common.files import folder_lock

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
MD5 = "c58f30108f718f92721af3b95e74349a"
ARCHIVE = "cifar-10-python.tar.gz"
BATCHES = "cifar-10-batches-py"
BATCH_FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
JPEG = b"\xff\xd8\xff"


class Images(NamedTuple):
    """A split in memory: ``images`` uint8 [N, 3, Y, X] in RGB, ``labels`` int64 [N]."""

    images: np.ndarray
    labels: np.ndarray


class CifarBatches:
    """The files that torchvision keeps: a pickled dict of 10,000 images each, as Python 2 wrote them."""

    num_classes = 10
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def count(self, split: str) -> int:
        """Return how many images the split has."""
        return len(self.load(split).labels)

    @property
    def fingerprint(self) -> str:
        """A checksum over the images and labels."""
        return fingerprint_of(
            hashlib.sha256(array.data).hexdigest() for split in BATCH_FILES for array in self.load(split)
        )

    def load(self, split: str) -> Images:
        """Read the split; raise `UserError` naming a file that is missing, damaged or something else."""
        parts = [self._load_batch(self.folder / name) for name in BATCH_FILES[split]]
        return Images(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _load_batch(self, path: Path) -> Images:
        try:
            batch = _load_pickle(path)
            images, labels = batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[b"labels"], np.int64)
            fits = images.dtype == np.uint8 and len(images) == len(labels) and set(labels.tolist()) <= set(range(10))
        except Exception as error:  # damaged pickles raise a dozen unrelated types
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise UserError(f"{path}: {reason}; remove {self.folder} and unpack {ARCHIVE} again") from error
        if not fits:
            raise UserError(f"{path}: not a batch of CIFAR-10; remove {self.folder} and unpack {ARCHIVE} again")
        return Images(images, labels)


class ImageFolder:
    """``train/<class>/*`` and ``test/<class>/*``: square images of one size; labels count the sorted class folders."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.class_names = sorted(path.name for path in (root / "train").iterdir() if path.is_dir())
        self.num_classes = len(self.class_names)
        if self.num_classes < 2:
            raise UserError(f"{root / 'train'}: {self.num_classes} class folders, at least 2 are needed")
        self._files = {split: self._list(split) for split in ("train", "test")}

    def _list(self, split: str) -> list[tuple[Path, int]]:
        folder = self.root / split
        names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        if names != self.class_names:
            odd = min(set(names) ^ set(self.class_names))
            raise UserError(f"{folder / odd}: split {split} needs train's class folders; add or remove this one")
        files = []
        for label, name in enumerate(names):
            found = sorted(path for path in (folder / name).iterdir() if not path.name.startswith("."))
            if not found:
                raise UserError(f"{folder / name}: no images; fill the folder, or remove it in train/ and test/")
            files += [(path, label) for path in found]
        return files

    def count(self, split: str) -> int:
        """Return how many images the split has."""
        return len(self._files[split])

    @property
    def fingerprint(self) -> str:
        """A checksum over paths and sizes; where the folder lies does not matter."""
        files = [path for split in self._files.values() for path, _ in split]
        return fingerprint_of(part for path in files for part in (path.relative_to(self.root), path.stat().st_size))

    def load(self, split: str) -> Images:
        """Decode the split; raise `UserError` naming an image that does not decode or is of another size."""
        files = self._files[split]
        first = _decode(files[0][0])
        images = np.empty((len(files), *first.shape), np.uint8)
        for row, (path, _) in enumerate(files):
            image = _decode(path)
            if image.shape != first.shape or first.shape[0] != first.shape[1]:
                raise UserError(
                    f"{path}: {image.shape[1]} x {image.shape[0]} pixels, the first of {self.root / split} has "
                    f"{first.shape[1]} x {first.shape[0]}; make all images squares of one size"
                )
            images[row] = image
        labels = np.array([label for _, label in files], np.int64)
        return Images(np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels)


def open_images(data: Mapping[str, Any]) -> CifarBatches | ImageFolder:
    """Find the data set at ``DATA.root``; fetch it first if it is not there and ``DATA.download`` says so.

    Of all processes of a machine that call this at once, one downloads and unpacks, and the others wait for it.
    """
    root = Path(data["root"])
    if (root / "train").is_dir():
        return ImageFolder(root)
    if not (root / BATCHES).is_dir():
        _unpack(root, data["download"])
    return CifarBatches(root / BATCHES)


def _unpack(root: Path, allow_download: bool) -> None:
    archive = root / ARCHIVE
    if not archive.is_file() and not allow_download:
        raise UserError(
            f"DATA.root={root} has no {BATCHES}/, {ARCHIVE} or train/<class>/*: "
            f"--set DATA.download=True fetches CIFAR-10 (170 MB) into it"
        )
    with folder_lock(root, wait=True):
        if (root / BATCHES).is_dir():  # another process was first
            return
        if archive.is_file():
            check_md5(archive, MD5)
        else:
            download(URL, archive, MD5)
        extract(archive, BATCHES, root)


OF_ARRAYS = {
    # under this name in files of Python 2; numpy 2 keeps it elsewhere
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads containers, numbers, strings and numpy arrays; a pickle that would call anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in OF_ARRAYS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return OF_ARRAYS[module, name]


def _load_pickle(path: Path) -> Any:
    with open(path, "rb") as file:
        return _ArrayUnpickler(file, encoding="bytes").load()


def _decode(path: Path) -> np.ndarray:
    """Return an image as uint8 [Y, X, 3]."""
    try:
        content = path.read_bytes()
        if content.startswith(JPEG):
            check_pixels(*simplejpeg.decode_jpeg_header(content)[:2])  # pyright: ignore[reportArgumentType]
            return simplejpeg.decode_jpeg(content)  # five times as fast as Pillow
        return np.asarray(open_image(content, is_upright=True))
    except Exception as error:  # decoders answer damaged files with a dozen unrelated types
        raise UserError(f"{path}: {reason_of(error)}; remove or replace this image") from error
