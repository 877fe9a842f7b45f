"""Find and list the WebDataset tars or parquet files of a source."""

import itertools
import re
from pathlib import Path

from common.data.image_folder import Files
from common.errors import UserError
from common.files import read_text
from imagenet_dali.parquet_source import class_names_of, list_parquet
from imagenet_dali.tar_source import Member, Place, list_webdataset
from imagenet_dali.workers import parallel_map

EVALUATION_FOLDERS = ("val", "validation", "test", "imagenet21k_val")
CONTAINER_FOLDERS = (".", "data", "train", *EVALUATION_FOLDERS)  # which are searched
CLASS_NAMES = "labels.txt"  # a class name a line, for class numbers without names


def find_containers(root: Path) -> list[str]:
    """Return the parquet files or else the tars of a source, by their paths from `root`."""
    folders = [root / name for name in CONTAINER_FOLDERS]
    for suffix in (".parquet", ".tar", ".tar.gz", ".tgz"):  # the last two are refused when they are listed
        paths = itertools.chain.from_iterable(folder.glob(f"*{suffix}") for folder in folders)
        if found := sorted(path.relative_to(root).as_posix() for path in paths):
            return found
    return []


def list_containers(
    root: Path, containers: list[str], workers: int
) -> tuple[list[str], dict[str, Files], dict[str, Place]]:
    """Return the class names, the images of each split and where they are.

    The first of train, val, validation and test in the path of a container is its split.
    """
    by_split: dict[str, list[str]] = {}
    for container in containers:
        words = re.findall("[a-z]+", container.lower())
        split = next((name for name in ("train", *EVALUATION_FOLDERS) if name in words), "train")
        by_split.setdefault(split, []).append(container)
    chosen = {"train": by_split.pop("train", [])}
    if held_out := next((name for name in EVALUATION_FOLDERS if name in by_split), None):
        chosen["validation"] = by_split[held_out]
    tasks = [(root, container) for container in itertools.chain(*chosen.values())]
    found = dict(parallel_map(_list_container, tasks, min(workers, len(tasks))))
    names = [name for members in found.values() for name, _, _ in members]
    if len(set(names)) < len(names):  # files of the same name in other folders, or numbers in each container
        found = {
            file: [(f"{file}/{number}/{name}", label, place) for number, (name, label, place) in enumerate(members)]
            for file, members in found.items()
        }
    splits = {split: [member for file in files for member in found[file]] for split, files in chosen.items()}
    for split, members in splits.items():
        if not members:
            raise UserError(f"{root}: no labelled images for the split {split} in {', '.join(containers[:3])}")
    class_names = class_names_of(root / containers[0]) if containers[0].endswith(".parquet") else None
    if class_names is None and (root / CLASS_NAMES).is_file():
        class_names = read_text(root / CLASS_NAMES).splitlines()
    class_names = _check_labels(root, splits, class_names)
    places = {name: place for members in splits.values() for name, _, place in members}
    files = {split: sorted((name, label) for name, label, _ in members) for split, members in splits.items()}
    return class_names, files, places


def _list_container(task: tuple[Path, str]) -> tuple[str, list[Member]]:
    root, container = task
    return container, (list_parquet if container.endswith(".parquet") else list_webdataset)(root, container)


def _check_labels(root: Path, splits: dict[str, list[Member]], class_names: list[str] | None) -> list[str]:
    """Return the class names, which are the class numbers if there are none."""
    present = {label for _, label, _ in splits["train"]}
    number = len(class_names) if class_names else max(present) + 1
    for name, label, place in itertools.chain(*splits.values()):
        if not 0 <= label < number:
            raise UserError(f"{root / place.container}: {name}: label {label}, out of range for {number} classes")
    if not class_names and len(present) < number:
        gap = next(label for label in itertools.count() if label not in present)
        raise UserError(f"{root}: labels to {number - 1} without {gap}; name all classes in {root / CLASS_NAMES}")
    if number < 2:
        raise UserError(f"{root}: a single class, at least 2 are needed")
    return class_names or [str(label) for label in range(number)]
