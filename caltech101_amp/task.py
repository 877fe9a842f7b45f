"""Caltech-101 (Fei-Fei et al., 2004): photographs of 101 categories, split, and their loaders."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.data.download import extract, fetch
from common.data.image_folder import list_classes, list_folders, split_by_class
from common.data.image_split import FolderSplit
from common.errors import UserError
from common.locks import folder_lock
from common.process import at_end
from common.task import image_task

URL = "https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip"
MD5 = "3138e1922a9193bfa496528edbbc45d0"
DOWNLOAD = "Caltech-101 (137 MB)"
FOLDER = "101_ObjectCategories"
ARCHIVE = f"{FOLDER}.tar.gz"  # within OUTER_FOLDER of OUTER_ARCHIVE
OUTER_FOLDER = "caltech-101"
TORCHVISION_FOLDER = "caltech101"  # torchvision.datasets.Caltech101 unpacks it into this
OUTER_ARCHIVE = f"{OUTER_FOLDER}.zip"
BACKGROUND = "BACKGROUND_Google"  # clutter, not a category
CATEGORIES = 101
IMAGES = 8677  # 9,144 with the clutter
TEST_SHARE = 0.2  # the data set has no split of its own
VALIDATION = f"{TEST_SHARE:.0%} of each category, held out"


def open_split(data: Mapping[str, Any], split: str) -> FolderSplit:
    """Open "train" or "test" of the data set at ``DATA.root``.

    A fixed fifth of each category is for testing. With ``DATA.download`` a missing data set is
    downloaded. If several processes of a machine call this at the same time, one downloads and
    unpacks while the others wait. Raises `UserError` for a data set that is missing or incomplete.
    """
    return _open(Path(data["root"]), data["download"])[split]


# Cached: the description of the data and both loaders ask for it.
@functools.cache
def _open(root: Path, allow_download: bool) -> dict[str, FolderSplit]:
    """Return the splits of the data set, wherever below ``root`` it is unpacked."""
    at_end(_open.cache_clear)  # the files may change until the next main function
    candidates = [root / parent / FOLDER for parent in ("", OUTER_FOLDER, TORCHVISION_FOLDER)]
    # Any category tells the folder of images from another.
    unpacked = [path for path in [*candidates, root] if (path / "accordion").is_dir()]
    folder = unpacked[0] if unpacked else _unpack(root, allow_download)
    class_names = [name for name in list_folders(folder) if name != BACKGROUND]
    files = list_classes(folder, folder, class_names)
    if len(class_names) != CATEGORIES or len(files) < IMAGES:
        raise UserError(
            f"{folder}: {len(class_names)} categories with {len(files):,} images, not {CATEGORIES} "
            f"with {IMAGES:,}; unpack {ARCHIVE} again, or add --set DATA.download=True with an "
            "empty folder"
        )
    train, test = split_by_class(files, TEST_SHARE)
    return {
        "train": FolderSplit(folder, class_names, train),
        "test": FolderSplit(folder, class_names, test, VALIDATION),
    }


def _unpack(root: Path, allow_download: bool) -> Path:
    """Unpack the data set's archive, a tar in a zip, and return the folder of images."""
    inner = root / OUTER_FOLDER / ARCHIVE
    archive = next((path for path in (root / ARCHIVE, inner) if path.is_file()), None)
    if archive is None:
        needed = f"{FOLDER}/, {ARCHIVE} or {OUTER_ARCHIVE}"
        fetch(inner, root / OUTER_ARCHIVE, URL, MD5, allow_download, needed, DOWNLOAD)
    with folder_lock(root, wait=True):
        # Another process may have been first.
        if not (root / FOLDER).is_dir():
            extract(archive or inner, FOLDER, root)
    return root / FOLDER


TASK = image_task(
    "caltech101_amp",
    open_split,
    script="caltech101_amp/train.py",
    recipe="config_fp32",  # the original configs have no MODEL, which this fills in
    recipes=("config_",),
    train_samples=6_941,  # assumed by a dry run without the data: 8,677 less a fifth
    download=DOWNLOAD,
)
build_train_loader = TASK.build_train_loader
build_eval_loader = TASK.build_eval_loader
