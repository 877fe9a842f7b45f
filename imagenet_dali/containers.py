"""Find and list the WebDataset tars or parquet files of a source."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.data.image_folder import Files
from common.errors import UserError
from imagenet_dali.manifest import read_labels
from imagenet_dali.parquet_source import class_names_of, list_parquet
from imagenet_dali.tar_source import Places, list_webdataset
from imagenet_dali.workers import parallel_map

EVALUATION_FOLDERS = ("val", "validation", "test", "imagenet21k_val")
CONTAINER_FOLDERS = (".", "data", "train", *EVALUATION_FOLDERS)  # which are searched
CLASS_NAMES = "labels.txt"  # a class name a line, for class numbers without names

MOST_CLASSES = 1 << 30  # a larger label is said to be this one


class Listing(NamedTuple):
    """The images of a container: names, labels and, as in `Places`, where they are."""

    names: list[str]
    labels: np.ndarray
    spans: np.ndarray


def find_containers(root: Path) -> list[str]:
    """Return the parquet files or else the tars of a source, by their paths from `root`."""
    folders = [root / name for name in CONTAINER_FOLDERS]
    for suffix in (".parquet", ".tar", ".tar.gz", ".tgz"):  # the last two are refused when they are listed
        paths = itertools.chain.from_iterable(folder.glob(f"*{suffix}") for folder in folders)
        if found := sorted(path.relative_to(root).as_posix() for path in paths):
            return found
    return []


def list_containers(root: Path, containers: list[str], workers: int) -> tuple[list[str], dict[str, Files], Places]:
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
    names = [name for listing in found.values() for name in listing.names]
    if len(set(names)) < len(names):  # files of the same name in other folders, or numbers in each container
        for file, listing in found.items():
            unique = [f"{file}/{number}/{name}" for number, name in enumerate(listing.names)]
            found[file] = listing._replace(names=unique)
    for split, members in chosen.items():
        if not any(found[file].names for file in members):
            raise UserError(f"{root}: no labelled images for the split {split} in {', '.join(containers[:3])}")
    class_names = class_names_of(root / containers[0]) if containers[0].endswith(".parquet") else None
    if class_names is None and (root / CLASS_NAMES).is_file():
        class_names = read_labels(root / CLASS_NAMES)
    train = np.concatenate([found[file].labels for file in chosen["train"]])
    class_names = _check_labels(root, found, train, class_names)
    files = {}
    for split, members in chosen.items():
        listings = [found[file] for file in members]
        files[split] = sorted(pair for each in listings for pair in zip(each.names, each.labels.tolist(), strict=True))
    return class_names, files, Places((file, listing.names, listing.spans) for file, listing in found.items())


def _list_container(task: tuple[Path, str]) -> tuple[str, Listing]:
    root, container = task
    members = (list_parquet if container.endswith(".parquet") else list_webdataset)(root, container)
    labels = np.array([max(-1, min(label, MOST_CLASSES)) for _, label, _ in members], np.int32)
    spans = np.array([place[1:] for _, _, place in members], np.int64).reshape(-1, 2)
    return container, Listing([name for name, _, _ in members], labels, spans)


def _check_labels(
    root: Path, found: Mapping[str, Listing], train: np.ndarray, class_names: list[str] | None
) -> list[str]:
    """Return the class names, which are the class numbers if there are none; ``train`` are the labels of training."""
    present = np.unique(train)
    number = len(class_names) if class_names else int(present[-1]) + 1
    for container, listing in found.items():
        for row in np.flatnonzero((listing.labels < 0) | (listing.labels >= number))[:1]:
            place = f"{root / container}: {listing.names[row]}"
            raise UserError(f"{place}: label {listing.labels[row]}, out of range for {number} classes")
    if not class_names and len(present) < number:
        gap = next(label for label in itertools.count() if label not in present)
        raise UserError(f"{root}: labels to {number - 1} without {gap}; name all classes in {root / CLASS_NAMES}")
    if number < 2:
        raise UserError(f"{root}: a single class, at least 2 are needed")
    return class_names or [str(label) for label in range(number)]
