"""Caltech-101 (Fei-Fei et al., 2004): 8,677 photographs of 101 categories, and a fixed split into train and test."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from caltech101_amp.corrupt_images import find_corrupt, report_corrupt
from common.data.download import check_md5, download, extract
from common.data.image_folder import Files, FolderSplit, list_files, list_folders, split_by_class
from common.errors import UserError
from common.files import folder_lock

URL = "https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip"
MD5 = "3138e1922a9193bfa496528edbbc45d0"
FOLDER = "101_ObjectCategories"
ARCHIVE = f"{FOLDER}.tar.gz"  # within OUTER_FOLDER of OUTER_ARCHIVE
OUTER_FOLDER = "caltech-101"
OUTER_ARCHIVE = f"{OUTER_FOLDER}.zip"
BACKGROUND = "BACKGROUND_Google"  # pictures of anything; not a category
CATEGORIES, IMAGES = 101, 8677
TEST_SHARE, SPLIT_SEED = 0.2, 0


def open_split(data: Mapping[str, Any], split: str) -> FolderSplit:
    """Open "train" or "test" of the data set at ``DATA.root``; fetch it first if ``DATA.download`` says so.

    A fifth of each category is for testing, the same in every run. Images that do not decode are left out of whichever
    split they are in. Of all processes of a machine that call this at once, one downloads, unpacks and checks, and the
    others wait for it. Raises `UserError` for a data set that is missing, incomplete or corrupt.
    """
    folder, class_names, splits = _open(Path(data["root"]), data["download"])
    return FolderSplit(folder, class_names, splits[split])


@functools.cache
def _open(root: Path, allow_download: bool) -> tuple[Path, list[str], dict[str, Files]]:
    folder = find_folder(root) or _unpack(root, allow_download)
    class_names = [name for name in list_folders(folder) if name != BACKGROUND]
    files = [
        (path.relative_to(folder).as_posix(), label)
        for label, name in enumerate(class_names)
        for path in list_files(folder / name)
    ]
    if len(class_names) != CATEGORIES or len(files) < IMAGES:
        raise UserError(
            f"{folder}: {len(class_names)} categories with {len(files):,} images, not {CATEGORIES} with {IMAGES:,}; "
            f"unpack {ARCHIVE} again, or let --set DATA.download=True fetch it into an empty folder"
        )
    corrupt = find_corrupt(folder, [path for path, _ in files])
    report_corrupt(folder, corrupt, len(files))
    train, test = split_by_class(files, TEST_SHARE, SPLIT_SEED)
    splits = {"train": train, "test": test}
    return folder, class_names, {name: [f for f in part if f[0] not in corrupt] for name, part in splits.items()}


def find_folder(root: Path) -> Path | None:
    """Return the folder of categories that ``root`` is, or has in it or in its ``caltech-101``; None without one."""
    within = (root / FOLDER, root / OUTER_FOLDER / FOLDER)
    found = next((path for path in within if path.is_dir()), None)
    return found or (root if (root / "accordion").is_dir() else None)


def _unpack(root: Path, allow_download: bool) -> Path:
    outer = root / OUTER_ARCHIVE
    archive = next((path for path in (root / ARCHIVE, root / OUTER_FOLDER / ARCHIVE) if path.is_file()), None)
    if archive is None and not outer.is_file() and not allow_download:
        raise UserError(
            f"DATA.root={root} has no {FOLDER}/, {ARCHIVE} or {OUTER_ARCHIVE}: "
            f"--set DATA.download=True fetches Caltech-101 (137 MB) into it"
        )
    with folder_lock(root, wait=True):
        if (root / FOLDER).is_dir():  # another process was first
            return root / FOLDER
        if archive is None:
            if outer.is_file():
                check_md5(outer, MD5)
            else:
                download(URL, outer, MD5)
            if not (root / OUTER_FOLDER).is_dir():
                extract(outer, OUTER_FOLDER, root)
            archive = root / OUTER_FOLDER / ARCHIVE
        extract(archive, FOLDER, root)
    return root / FOLDER
