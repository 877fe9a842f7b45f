"""List the labelled images in folders, and split them."""

import hashlib
import os
import random
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import OF_A_PATH, canonical_name, retry_read
from common.text import UNPRINTABLE, list_some, printable

# Suffixes of images, or none; of kinds too that are not read, so that such images are refused and
# not ignored.
IMAGE_SUFFIX = re.compile(
    r"(\.(a?png|arw|avif|bmp|cr[23]|dib|dng|gif|hei[cf]|ico|j2k|jp2|jpe?g?|jfif?|jif|jxl|nef|"
    r"p[bgnp]m|pcx|psd|svg|tga|tiff?|webp))?",
    re.IGNORECASE,
)

SPLITS = {
    "train": "train",
    "training": "train",
    "trainval": "train",
    "trn": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "publictest": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    "tst": "test",
    "holdout": "test",
    "privatetest": "test",
}
# Matches the name of a split's folder: Training, train_set, val-images, seg_test, train2017.
SPLIT_NAME = re.compile(
    rf"(?:seg_|images?_)?({'|'.join(SPLITS)})(?:[_ -]?(?:set|split|data|images?|imgs?|\d+))*",
    re.IGNORECASE,
)
# Folders that a file server makes, or an archive made on a Mac has.
NO_CLASSES = ("@eaDir", "#recycle", "__MACOSX")

Files = list[tuple[str, int]]  # (path relative to the root, label)


def _is_hidden(name: str) -> bool:
    """Return whether a name is no user's: of a tool, or hidden from listings."""
    return name.startswith(".") or name in NO_CLASSES


def _is_image(name: str) -> bool:
    """Return whether a file is taken for an image: by its suffix, or as it has none."""
    return bool(IMAGE_SUFFIX.fullmatch(os.path.splitext(name)[1]))


def list_folders(path: Path) -> list[str]:
    """Return the names of the folders in ``path`` that are not hidden, sorted.

    Raises `UserError` for a link to nothing, which may have been one.
    """
    names = []
    # scandir knows which are folders without asking for each file: there may be a million.
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


def _loose_images(folder: Path) -> Iterator[Path]:
    """Yield the images in ``folder`` itself."""
    for path in folder.iterdir():
        if _is_image(path.name) and not _is_hidden(path.name) and not path.is_dir():
            yield path


def find_splits(root: Path) -> dict[str, Path]:
    """Return the folders in ``root`` by the split that their names say (`SPLIT_NAME`).

    {} means class folders. Raises `UserError` for a split beside other folders, and for a second
    folder of a split.
    """
    by_split = {}
    others = []
    for name in list_folders(root):
        split = SPLIT_NAME.fullmatch(name)
        if not split:
            others.append(name)
        # A folder with neither has tars, or nothing.
        elif list_folders(root / name) or any(_loose_images(root / name)):
            by_split.setdefault(SPLITS[split[1].lower()], []).append(root / name)
    for split, folders in by_split.items():
        beside = [*folders[1:], *others]
        if beside:
            raise UserError(
                f"{folders[0]}: named as a split, {split}, beside "
                f"{list_some([*map(str, beside)])}; sort classes into train/<class>/*, "
                "val/<class>/* and test/<class>/*, and rename or move other folders"
            )
    return {split: folders[0] for split, folders in by_split.items()}


def _check_levels(folder: Path, classes: Sequence[str]) -> None:
    """Raise `UserError` where class folders hold class folders, as in a set copied into itself."""
    levels = {folder: {*classes}}
    for name in classes:
        inside = set() if any(_loose_images(folder / name)) else {*list_folders(folder / name)}
        for other, names in levels.items():
            # One common name may be chance: a class may be named like a subclass of another.
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
    images = []
    visited = set()  # real paths, since links are followed
    for folder, subfolders, names in os.walk(path, onerror=_raise_if_there, followlinks=True):
        # In place: os.walk follows the folders that are left.
        subfolders[:] = sorted(name for name in subfolders if not _is_hidden(name))
        target = os.path.realpath(folder)
        if target in visited:  # A link to a folder above would be followed without end.
            subfolders.clear()
            continue
        visited.add(target)
        for name in names:
            if _is_hidden(name):
                continue
            path = Path(folder, name)
            if _is_image(name):
                images.append(path)
            elif ignored is not None:
                ignored.append(path)
    return sorted(images)


def _raise_if_there(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed, but for one that has just been removed."""
    if not isinstance(error, FileNotFoundError):
        raise error


def check_class_names(names: Iterable[str], path: Path) -> None:
    """Raise `UserError` for a name that a line of text, JSON or a terminal cannot hold."""
    for name in names:
        if UNPRINTABLE.search(name):
            raise UserError(
                f"{path}: class {printable(name)[:200]} has a control character, a line separator "
                "or bytes that are not UTF-8 in its name: rename it"
            )


def file_state(path: Path) -> tuple[int, int]:
    """Return size and time of a file; (-1, 0) for a link to nothing or where access is denied."""
    try:
        state = retry_read(path, path.stat)
    except OSError as error:
        if error.errno not in OF_A_PATH:
            raise
        # Such a file must not refuse the data set here: reading it names it.
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


def note_missing(description: str, class_names: Sequence[str], labels: np.ndarray) -> str:
    """Return ``description``, and which classes none of ``labels`` is of."""
    present = {*labels.tolist()}
    missing = [name for label, name in enumerate(class_names) if label not in present]
    if not missing:
        return description
    share = f"{len(missing)} of {len(class_names)} classes"
    return f"{description}; no images of {share}: {list_some(missing)}"


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
    # Names that differ only in their Unicode form are one class.
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
        if ignored is not None:
            ignored += sorted(_loose_images(folder))  # beside the class folders
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
            # The hashes are sorted: hold out those below the share, but at least one.
            number = max(share > 0, bisect_left(hashed, (share,)))
        # At least one image of each class is trained on.
        number = min(number, len(members) - 1)
        held_out += sorted(members[:number])
        kept += sorted(members[number:])
    return kept, held_out


def _hash_name(class_name: str, path: str) -> float:
    """Return a number from 0 to 1 that depends on an image's class and its path in it alone."""
    class_name = canonical_name(class_name)
    # "cat/1.jpg" and "train/cat/1.jpg" are the same image.
    inside = canonical_name(f"/{path}").partition(f"/{class_name}/")[2] or path
    # Names of files need not be UTF-8.
    name = f"{class_name}/{inside}".encode(errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2**64
