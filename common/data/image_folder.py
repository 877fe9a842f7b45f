"""Labelled images in folders: list and split them, read and decode one, report bad ones."""

import hashlib
import io
import os
import random
import re
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, PngImagePlugin
from simplejpeg import decode_jpeg

from common.errors import UserError
from common.files import canonical_name, fingerprint_of, read_bytes
from common.text import UNPRINTABLE, list_some, printable

# Suffixes of images, or none; of kinds too that are not read, so that such images are refused and
# not ignored.
IMAGE_SUFFIX = re.compile(
    r"(\.(a?png|arw|avif|bmp|cr[23]|dib|dng|gif|hei[cf]|ico|j2k|jp2|jpe?g?|jfif?|jif|jxl|nef|p[bgnp]m|pcx|psd|svg|tga|"
    r"tiff?|webp))?",
    re.IGNORECASE,
)
# Pillow's other formats run programs, or are not for photographs
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP")
# 300 MB when decoded; beyond it, a header that lies is likelier than a photograph
MAX_PIXELS = 100_000_000
Image.MAX_IMAGE_PIXELS = None  # `check_pixels` refuses what Pillow would only warn of
# Of one text or profile Pillow takes 1 MB; editors write more. The sum of texts stays limited.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
MAX_BAD_SHARE = 0.01
UNREADABLE = "not a readable image: "  # and then the decoder's message
NAMED = 20  # of a list that may have a million
# of an image: four channels without compression, and metadata
MAX_BYTES = 4 * MAX_PIXELS + (1 << 20)
# What libjpeg-turbo says of files that lack no pixels. Bytes before a restart marker (d0 to d7) are
# what is left of a block that was cut. Of unusual subsampling only Pillow can decode the pixels.
HARMLESS = re.compile("bytes before marker 0x(?!d[0-7])|subsampling level|Invalid SOS parameters")
SEGMENT = re.compile(rb"\xff+([\xc0-\xcf\xda-\xfe])(..)", re.DOTALL)  # marker and length
ORIENTATION = ExifTags.Base.Orientation

SPLITS = {
    "train": "train",
    "training": "train",
    "trainval": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
# of a folder: Training, train_set, val-images, seg_test, train2017
SPLIT_NAME = re.compile(
    rf"(?:seg_|images?_)?({'|'.join(SPLITS)})(?:[_ -]?(?:set|split|data|images?|imgs?|\d+))*",
    re.IGNORECASE,
)
# folders of a file server, of an archive made on a Mac
NO_CLASSES = ("@eaDir", "#recycle", "__MACOSX")

Files = list[tuple[str, int]]  # (path relative to the root, label)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in NO_CLASSES


def _is_image(name: str) -> bool:
    """Return whether a file is taken for an image: by its suffix, or as it has none."""
    return bool(IMAGE_SUFFIX.fullmatch(os.path.splitext(name)[1]))


def list_folders(path: Path) -> list[str]:
    """Return the names of the folders in ``path`` that are not hidden, sorted.

    Raises `UserError` for a link to nothing, which may have been one.
    """
    names = []
    with os.scandir(path) as entries:
        for entry in entries:
            if _is_hidden(entry.name):
                continue
            if entry.is_dir():
                names.append(entry.name)
            elif entry.is_symlink() and not os.path.exists(entry.path):
                raise UserError(
                    f"{entry.path}: a link to {os.readlink(entry.path)}, which is not there; mend "
                    "or remove it"
                )
    return sorted(names)


def _has_images(folder: Path) -> bool:
    """Return whether images lie in ``folder`` itself."""
    return any(
        _is_image(path.name) and not _is_hidden(path.name) and not path.is_dir()
        for path in folder.iterdir()
    )


def find_splits(root: Path) -> dict[str, Path]:
    """Return the folders in ``root`` by the split that their names say (`SPLIT_NAME`).

    {} means class folders. Raises `UserError` for a split beside other folders, and for a second
    folder of a split.
    """
    found = {}
    others = []
    for name in list_folders(root):
        split = SPLIT_NAME.fullmatch(name)
        if not split:
            others.append(name)
        elif list_folders(root / name) or _has_images(root / name):  # else tars, or nothing
            found.setdefault(SPLITS[split[1].lower()], []).append(root / name)
    for split, folders in found.items():
        beside = [*folders[1:], *others]
        if beside:
            raise UserError(
                f"{folders[0]}: named as a split, {split}, beside "
                f"{list_some([*map(str, beside)])}; sort classes into train/<class>/*, "
                "val/<class>/* and test/<class>/*, and rename or move other folders"
            )
    return {split: folder for split, (folder, *_) in found.items()}


def _check_levels(folder: Path, classes: Sequence[str]) -> None:
    """Raise `UserError` where class folders hold class folders, as in a set copied into itself."""
    levels = {folder: {*classes}}
    for name in classes:
        inside = set() if _has_images(folder / name) else {*list_folders(folder / name)}
        for other, names in levels.items():
            if len(inside & names) > 1:
                raise UserError(
                    f"{folder / name}: holds folders {list_some(sorted(inside & names))} and no "
                    f"images, and so does {other}; which level are the classes? Name that folder, "
                    "or move the images of a class into its own folder"
                )
        levels[folder / name] = inside


def list_files(path: Path, ignored: list[Path] | None = None) -> list[Path]:
    """Return every file below ``path`` that may be an image, by its suffix or for lack of one.

    They are sorted, without hidden ones. The other files are added to ``ignored``. A folder that
    cannot be read raises OSError.
    """
    found = []
    visited = set()
    others = [] if ignored is None else ignored
    for folder, subfolders, names in os.walk(path, onerror=_raise_if_there, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if not _is_hidden(name))
        target = os.path.realpath(folder)
        if target in visited:  # a link to a folder above would be followed without end
            subfolders.clear()
            continue
        visited.add(target)
        for name in names:
            if not _is_hidden(name):
                (found if _is_image(name) else others).append(Path(folder, name))
    return sorted(found)


def _raise_if_there(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def check_class_names(names: Iterable[str], place: Path) -> None:
    """Raise `UserError` for a name that a line of text, JSON or a terminal cannot hold."""
    for name in names:
        if UNPRINTABLE.search(name):
            raise UserError(
                f"{place}: class {printable(name)[:200]} has a control character, a line separator "
                "or bytes that are not UTF-8 in its name: rename it"
            )


def file_state(path: Path) -> tuple[int, int]:
    """Return size and time of a file; (-1, 0) for a link to nothing or where access is denied."""
    try:
        state = path.stat()
    except OSError:
        return -1, 0
    return state.st_size, state.st_mtime_ns


def list_classes(
    root: Path, folder: Path, classes: Sequence[str], ignored: list[Path] | None = None
) -> Files:
    """Return the files of each ``folder/<class>/``, as paths from ``root``, with their labels.

    Other folders do not count. Names that differ in their Unicode form alone are one.
    """
    check_class_names(classes, folder)
    labels = {canonical_name(name): label for label, name in enumerate(classes)}
    return [
        (path.relative_to(root).as_posix(), labels[canonical_name(name)])
        for name in list_folders(folder)
        if canonical_name(name) in labels
        for path in list_files(folder / name, ignored)
    ]


def note_missing(place: str, class_names: Sequence[str], labels: np.ndarray) -> str:
    """Return ``place``, and which classes none of ``labels`` is of."""
    present = {*labels.tolist()}
    missing = [name for label, name in enumerate(class_names) if label not in present]
    if not missing:
        return place
    share = f"{len(missing)} of {len(class_names)} classes"
    return f"{place}; no images of {share}: {list_some(missing)}"


def list_splits(
    root: Path,
    folders: Mapping[str, Path],
    ignored: list[Path] | None = None,
    *,
    is_training: bool = True,
) -> tuple[list[str], dict[str, Files]]:
    """Return the class folders of ``folders["train"]``, and the files of each of ``folders``.

    Raises `UserError` for fewer than two classes, for a class or a split without images, for one
    that has no training images, and for class folders within class folders. Without
    ``is_training``, one class suffices, and classes may be empty.
    """
    train = folders["train"]
    classes = [*{canonical_name(name): name for name in list_folders(train)}.values()]
    is_wrapper = len(classes) == 1 and list_folders(train / classes[0])
    if not classes or is_wrapper or (is_training and len(classes) < 2):
        hint = f"; is {train / classes[0]} the folder you mean?" if classes else ""
        raise UserError(
            f"{train}: {len(classes)} class folders, at least 2 are needed, as "
            f"{train}/<class>/*{hint}"
        )
    known = {*map(canonical_name, classes)}
    splits = {}
    for split, folder in folders.items():
        names = list_folders(folder) if folder.is_dir() else []
        _check_levels(folder, names)
        unknown = [name for name in names if canonical_name(name) not in known]
        if unknown:
            raise UserError(
                f"{folder / unknown[0]}: this class has no training images; remove it or add them"
            )
        splits[split] = list_classes(root, folder, classes, ignored) if names else []
        if not splits[split]:
            raise UserError(f"{folder}: no images; they are expected as {folder}/<class>/*")
    empty = {*range(len(classes))} - {label for _, label in splits["train"]}
    if empty and is_training:
        raise UserError(f"{train / classes[min(empty)]}: no images; remove the folder or fill it")
    return classes, splits


def split_by_class(
    files: Files, share: float, class_names: Sequence[str] | None = None
) -> tuple[Files, Files]:
    """Return kept and held-out files: about ``share`` of each class is held out, but never all.

    An image's side depends on its own name, whatever comes or goes; but of two images or more, one
    is kept and one held out. Without ``class_names`` each class is shuffled and cut, so that one
    image more moves others.
    """
    by_class = defaultdict(list)
    for file in files:
        by_class[file[1]].append(file)
    kept = []
    held_out = []
    for label, members in by_class.items():
        if class_names is None:
            random.Random(f"0/{label}").shuffle(members)
            number = round(share * len(members))
        else:
            name = str(class_names[label])
            hashed = sorted((_hash_name(name, file[0]), file) for file in members)
            members = [file for _, file in hashed]
            number = max(share > 0, bisect_left(hashed, (share,)))
        number = min(number, len(members) - 1)
        held_out += sorted(members[:number])
        kept += sorted(members[number:])
    return kept, held_out


def _hash_name(class_name: str, path: str) -> float:
    """Return a number from 0 to 1 that depends on an image's class and its path in it alone."""
    class_name = canonical_name(class_name)
    inside = canonical_name(f"/{path}").partition(f"/{class_name}/")[2] or path
    name = f"{class_name}/{inside}".encode(errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2**64


class FolderSplit:
    """One split of the images below ``root``; ``place`` says where the validation images come
    from, and ``held_out`` which share of train they are and how it was drawn, if they are.
    """

    # an image may be of any kind, and say in its EXIF block how it is to be turned
    is_prepared = False

    def __init__(
        self,
        root: Path,
        class_names: Sequence[str],
        files: Files,
        place: str = "",
        held_out: str = "",
    ) -> None:
        self.root = root
        self.class_names = class_names
        self.place = place
        self.held_out = held_out
        # arrays, because workers would copy a million strings page by page as they count references
        self._paths = np.array([os.fsencode(path) for path, _ in files])
        self.labels = np.array([label for _, label in files], np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        """Return where an image lies."""
        return self.root / os.fsdecode(self._paths[index])

    def read(self, index: int) -> tuple[bytes, int]:
        """Return ``(content of the file, label)`` of one image."""
        try:
            return read_bytes(self.path(index), MAX_BYTES), int(self.labels[index])
        except UserError as error:
            raise UserError(f"{error}; remove or replace this image") from error

    def fault(self, index: int, reason: object) -> UserError:
        """Return the error for an image that cannot be used."""
        return UserError(f"{self.path(index)}: {reason}; remove or replace this image")

    @property
    def fingerprint(self) -> str:
        """A checksum over paths, labels and sizes; where the folder lies does not matter."""
        files = sorted(zip(map(os.fsdecode, self._paths), self.labels.tolist(), strict=True))
        described = (f"{label} {file_state(self.root / path)[0]} {path}" for path, label in files)
        return fingerprint_of(chain(self.class_names, described))


def check_pixels(height: int, width: int) -> None:
    """Raise `ValueError` for an image that is too large to be decoded."""
    if height * width > MAX_PIXELS:
        raise ValueError(f"{width}x{height} is more than {MAX_PIXELS // 1_000_000} million pixels")


def decode_image(data: bytes | memoryview) -> np.ndarray:
    """Decode an image to Pillow's pixels in RGB, uint8 [Y, X, 3], turned as its EXIF block says.

    Raises `ValueError` beyond `MAX_PIXELS`, for pixels of an unknown range and for a JPEG that
    lacks data, which Pillow would fill with grey; and what Pillow does, for a wrong checksum too.
    """
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    check_pixels(image.height, image.width)
    pixels = None
    if image.format in ("JPEG", "MPO"):
        pixels = _decode_jpeg(bytes(data), image.mode)
    else:
        Image.open(io.BytesIO(data), formats=FORMATS).verify()  # checksums that decoding ignores
    if pixels is None:
        pixels = np.array(_to_rgb(image))
    if not is_turned(image):  # asked after the pixels, because Pillow turns a TIFF as it loads it
        return pixels
    upright = Image.fromarray(pixels)  # not `image`, whose other tags Pillow may fail to copy
    upright.getexif()[ORIENTATION] = image.getexif()[ORIENTATION]
    return np.array(ImageOps.exif_transpose(upright))


def _decode_jpeg(data: bytes, mode: str) -> np.ndarray | None:
    """Return the pixels of a JPEG; None where Pillow decodes better: CMYK, or after a warning.

    libjpeg repairs a file that lacks data with a warning; here `ValueError` is raised.
    """
    colors = "CMYK" if mode == "CMYK" else "RGB"
    try:
        pixels = decode_jpeg(data, colors)  # the pixels of Pillow in less than half the time
    except ValueError:
        try:
            decode_jpeg(_without_metadata(data), colors)
        except ValueError as error:
            if not HARMLESS.search(str(error)):
                raise
        return None
    return None if mode == "CMYK" else pixels


def _without_metadata(data: bytes) -> bytes:
    """Return a JPEG without metadata and bytes between the segments before its first scan.

    libjpeg-turbo tells its first warning only. If that is of one of these, there may be more.
    """
    kept = data[:2]
    end = 2
    while segment := SEGMENT.search(data, end):
        end = segment.end(1) + int.from_bytes(segment[2])
        if segment[1] == b"\xda":  # the first scan
            return kept + data[segment.start() :]
        if segment[1] < b"\xe0":
            kept += data[segment.start() : end]
    return data


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB: alpha is dropped, 12 and 16 bits become 8."""
    # Pillow would clip these at 255; those of a PPM file are in mode "I"
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        tags = getattr(image, "tag_v2", {})  # of a TIFF
        bits = tags.get(ExifTags.Base.BitsPerSample, [16])[0]
        grey = (np.asarray(image) / ((2**bits - 1) / 255)).round().astype(np.uint8)
        is_white_zero = tags.get(ExifTags.Base.PhotometricInterpretation) == 0
        image = Image.fromarray(255 - grey if is_white_zero else grey)
    if image.mode in ("I", "F"):
        raise ValueError("32-bit pixels, whose range is not known")
    return image.convert("RGB")


def is_turned(image: Image.Image) -> bool:
    """Return whether an image's EXIF block says that it is to be turned or mirrored."""
    try:
        return image.getexif().get(ORIENTATION) in range(2, 9)
    except Exception:  # a damaged EXIF block says nothing against the pixels
        return False


class BadImages:
    """Count the images that a loader skips, and name each of the first `NAMED` once on stderr.

    Clearly more than `MAX_BAD_SHARE` of the ``samples`` that this process reads in a pass raise
    `UserError`.
    """

    def __init__(self, samples: float) -> None:
        self.samples = samples
        self.count = 0  # of this pass
        self._named = set()

    def add(self, messages: Iterable[str]) -> None:
        """Count the skipped images of a batch, given a message for each."""
        for message in messages:
            self.count += 1
            allowed = MAX_BAD_SHARE * self.samples
            # by chance a process may get more than its share: four standard deviations
            if self.count > max(1, allowed + 4 * allowed**0.5):
                raise UserError(
                    f"{message}; with it {self.count:,} of the {self.samples:,.0f} images that "
                    f"this process reads in a pass are bad, more than {MAX_BAD_SHARE:.0%}"
                )
            if message not in self._named and len(self._named) < NAMED:
                self._named.add(message)
                # one write, unlike print: ranks share stderr
                sys.stderr.write(f"skipped: {printable(message)}\n")
