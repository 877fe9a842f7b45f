"""Labelled images in folders: list them, split them, read and decode one."""

import io
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from common.errors import UserError
from common.files import fingerprint_of

# Pillow's other formats run programs, or are not for photographs
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 100_000_000  # 300 MB when decoded; beyond it, a header that lies is likelier than a photograph

Files = list[tuple[str, int]]  # (path relative to the root, label)


def list_folders(path: Path) -> list[str]:
    """Return the names of the folders in ``path`` that are not hidden, sorted."""
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))


def list_files(path: Path) -> list[Path]:
    """Return every file below ``path`` that is not hidden, sorted, whether or not it is an image."""
    found = []
    for folder, subfolders, names in os.walk(path, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found)


def list_classes(root: Path, folder: Path, classes: Sequence[str]) -> Files:
    """Return the files in ``folder/<class>/`` by their path from ``root``, with the number of the class as label."""
    return [
        (path.relative_to(root).as_posix(), label)
        for label, name in enumerate(classes)
        for path in list_files(folder / name)
    ]


def split_by_class(files: Files, share: float, seed: int) -> tuple[Files, Files]:
    """Return kept and held-out files: ``share`` of each class is held out, chosen by ``seed``, but never all of one."""
    by_class = defaultdict(list)
    for file in files:
        by_class[file[1]].append(file)
    kept: Files = []
    held_out: Files = []
    for label, members in by_class.items():
        random.Random(f"{seed}/{label}").shuffle(members)
        number = min(round(share * len(members)), len(members) - 1)
        held_out += sorted(members[:number])
        kept += sorted(members[number:])
    return kept, held_out


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB: alpha is dropped, 16 bits become 8; raise ValueError where the range is not known."""
    # 16 bits, which Pillow would clip at 255; those of a PPM file are in mode "I"
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("32-bit pixels, whose range is not known")
    return image.convert("RGB")


class FolderSplit:
    """One split of the images below ``root``."""

    is_upright = False  # an image may say in its EXIF block how it is to be turned

    def __init__(self, root: Path, class_names: Sequence[str], files: Files) -> None:
        self.root, self.class_names, self.num_classes = root, class_names, len(class_names)
        # arrays, because workers would copy a million strings page by page as they count references
        self._paths = np.array([os.fsencode(path) for path, _ in files])
        self._labels = np.array([label for _, label in files], np.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def path(self, index: int) -> Path:
        """Return where an image lies."""
        return self.root / os.fsdecode(self._paths[index])

    def read(self, index: int) -> tuple[bytes, int]:
        """Return ``(content of the file, label)`` of one image."""
        path = self.path(index)
        try:
            return path.read_bytes(), int(self._labels[index])
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; the folder changed after it was listed") from error

    def fault(self, index: int, reason: object) -> UserError:
        """Return the error for an image that cannot be used."""
        return UserError(f"{self.path(index)}: {reason}; remove or replace this image")

    @property
    def fingerprint(self) -> str:
        """A checksum over paths, labels and sizes; where the folder lies does not matter."""
        return fingerprint_of(self._describe())

    def _describe(self) -> Iterator[str]:
        yield from self.class_names
        root = os.fspath(self.root)
        for path, label in sorted(zip(map(os.fsdecode, self._paths), self._labels.tolist(), strict=True)):
            try:
                size = os.stat(f"{root}/{path}").st_size  # a Path takes twice the time, of a million images
            except OSError as error:
                raise UserError(f"{root}/{path}: {error.strerror}; fix or remove this image") from error
            yield f"{label} {size} {path}"


def check_pixels(height: int, width: int) -> None:
    """Raise `ValueError` for an image that is too large to be decoded."""
    if height * width > MAX_PIXELS:
        raise ValueError(f"{width}x{height} is more than {MAX_PIXELS // 1_000_000} million pixels")


def open_image(data: bytes | memoryview, is_upright: bool = False) -> Image.Image:
    """Decode an image to RGB, turned as its EXIF block says unless it ``is_upright``.

    Raises `ValueError` beyond `MAX_PIXELS`, what `to_rgb` raises, and what Pillow does.
    """
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    check_pixels(image.height, image.width)
    return to_rgb(image if is_upright else ImageOps.exif_transpose(image))
