"""Images inside tar and parquet files: find them without reading them, and read some."""

import itertools
import json
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from pydantic_core import from_json

from common.data.image_folder import Files
from common.errors import UserError, first_line
from imagenet_dali.dataset import LABELS, read_labels

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

EVALUATION_FOLDERS = ("val", "validation", "test")
CONTAINER_FOLDERS = (".", "data", "train", *EVALUATION_FOLDERS)  # which are searched
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "tif", "tiff")  # in WebDataset tars


class Place(NamedTuple):
    """Where an image is: the first byte and the size in a tar, the row group and the row in it in a parquet file."""

    container: str  # path relative to the source's root
    start: int
    size: int

    @property
    def is_row(self) -> bool:
        """Whether the image is in a parquet file."""
        return self.container.endswith(".parquet")


Listing = list[tuple[str, int, Place]]  # name, label and place of each image of a container


def find_containers(root: Path) -> list[str]:
    """Return the parquet files or else the tars of a source, by their paths from `root`."""
    for suffix in (".parquet", ".tar", ".tar.gz", ".tgz"):  # the last two are refused when they are listed
        paths = itertools.chain.from_iterable((root / name).glob(f"*{suffix}") for name in CONTAINER_FOLDERS)
        if found := sorted(path.relative_to(root).as_posix() for path in paths):
            return found
    return []


def list_containers(root: Path, containers: list[str]) -> tuple[list[str], dict[str, Files], dict[str, Place]]:
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
    found: dict[str, Listing] = {}
    for container in itertools.chain(*chosen.values()):
        found[container] = (_list_parquet if container.endswith(".parquet") else _list_webdataset)(root, container)
    total = sum(map(len, found.values()))
    if len({name for listing in found.values() for name, _, _ in listing}) < total:
        for file, listing in found.items():  # of the same name in other folders, or numbered in each container
            found[file] = [(f"{file}/{n}/{name}", label, place) for n, (name, label, place) in enumerate(listing)]
    splits = {}
    for split, members in chosen.items():
        splits[split] = sorted((name, label) for file in members for name, label, _ in found[file])
        if not splits[split]:
            raise UserError(f"{root}: no labelled images for the split {split} in {', '.join(containers[:3])}")
    class_names = _class_names(root, containers[0], {label for _, label in splits["train"]})
    for file, listing in found.items():
        for name, label, _ in listing:
            if not 0 <= label < len(class_names):
                raise UserError(f"{root / file}: {name}: label {label}, out of range for {len(class_names)} classes")
    return class_names, splits, {name: place for each in found.values() for name, _, place in each}


def _class_names(root: Path, container: str, present: set[int]) -> list[str]:
    """Return the names in a parquet file or in `LABELS`, else the class numbers, of which none may be missing."""
    names = None
    if container.endswith(".parquet"):
        with _open_parquet(root / container) as file:
            names = _describe(file, root / container)[2]
    if names is None and (root / LABELS).is_file():
        names = read_labels(root / LABELS)
    if names is None:
        names = [str(label) for label in range(len(present))]
        if present != set(range(len(names))):
            raise UserError(f"{root}: labels {min(present)} to {max(present)} with gaps; name all in {root / LABELS}")
    if len(names) < 2:
        raise UserError(f"{root}: a single class, at least 2 are needed")
    return names


def tar_members(path: Path, start: int = 0, end: int | None = None) -> Iterator[tuple[tarfile.TarInfo, BinaryIO]]:
    """Yield each regular member of a tar, which may be a part of a file, and the open file.

    Raises `UserError` naming the member at which the tar is truncated or damaged, for which tarfile just ends.
    """
    end, name = path.stat().st_size if end is None else end, "its first member"
    with path.open("rb") as file:
        file.seek(start)
        try:
            tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
            for member in tar:
                name = member.name
                if member.isreg():
                    yield member, file
            file.seek(tar.offset)
            if tar.offset >= end or file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError
        except tarfile.TarError as error:
            raise UserError(
                f"{path}: compressed, truncated or damaged at {name}; run gunzip on it, or download it again"
            ) from error


def _list_webdataset(root: Path, container: str) -> Listing:
    """Return the images of a tar in which ``key.cls`` or ``key.json`` holds the label of ``key.jpg``."""
    path, images, labels = root / container, {}, {}
    for member, file in tar_members(path):
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.lower().partition(".")
        key = f"{folder}/{base[: len(stem)]}"
        if suffix in IMAGE_SUFFIXES:
            images[member.name] = key, Place(container, member.offset_data, member.size)
        elif suffix in ("cls", "json"):
            file.seek(member.offset_data)
            content = file.read(member.size)
            with suppress(ValueError, AttributeError):
                labels[key] = int(content) if suffix == "cls" else labels.get(key, from_json(content).get("label"))
    for name, (key, _) in images.items():
        if type(labels.get(key)) is not int:
            raise UserError(
                f"{path}: {name}: no label; its sample needs a class number, counted from 0, in a .cls, or in a .json "
                "as the field label"
            )
    return [(name, labels[key], place) for name, (key, place) in images.items()]


def _list_parquet(root: Path, container: str) -> Listing:
    """Return the images of a parquet file; without a path a row's number is its name."""
    path, found = root / container, []
    with _open_parquet(path) as file:
        image, label_column, _ = _describe(file, path)
        for group in range(file.num_row_groups):
            labels = _read(file, group, label_column)
            names = _read(file, group, f"{image}.path") or [None] * len(labels)
            for row, (name, label) in enumerate(zip(names, labels, strict=True)):
                name = name or f"{container}/{len(found)}"
                if label is None:
                    raise UserError(f"{path}: {name}: row {len(found)} has no label; remove it or add one")
                found.append((name, label, Place(container, group, row)))
    return found


def read_rows(root: Path, places: Iterator[Place]) -> dict[Place, bytes]:
    """Return the images at ``places``; each row group is read once, since it is compressed as a whole."""
    groups = defaultdict(list)
    for place in places:
        groups[place.container, place.start].append(place)
    images = {}
    for (container, group), members in sorted(groups.items()):
        with _open_parquet(root / container) as file:
            image, *_ = _describe(file, root / container)
            content = _read(file, group, f"{image}.bytes", [place.size for place in members])
            images |= {place: data or b"" for place, data in zip(members, content, strict=True)}
    return images


@contextmanager
def _open_parquet(path: Path) -> Iterator["ParquetFile"]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: {first_line(error)}; download it again") from error


def _describe(file: "ParquetFile", path: Path) -> tuple[str, str, list[str] | None]:
    """Return the columns of images, which are structs with a field ``bytes``, and of labels; and the class names."""
    from pyarrow.types import is_integer, is_struct

    schema, classes = file.schema_arrow, {}
    if b"huggingface" in (schema.metadata or {}):
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        classes = {name: each["names"] for name, each in features.items() if each.get("_type") == "ClassLabel"}
    images = [each.name for each in schema if is_struct(each.type) and each.type.get_field_index("bytes") >= 0]
    labels = [name for name in (*classes, "label") if name in schema.names and is_integer(schema.field(name).type)]
    if not images or not labels:
        found = ", ".join(schema.names)
        raise UserError(f"{path}: columns {found}; a struct with the field bytes and an integer label are needed")
    return images[0], labels[0], classes.get(labels[0])


def _read(file: "ParquetFile", group: int, name: str, rows: Sequence[int] | None = None) -> list:
    """Return a column of a row group, or a field as ``column.field``, or some of its rows; [] if there is none."""
    read = file.read_row_group(group, [name], use_threads=False).flatten()
    if name not in read.column_names:
        return []
    return read[name].to_pylist() if rows is None else [read[name][row].as_py() for row in rows]
