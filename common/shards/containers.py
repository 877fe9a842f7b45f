"""List and read images in tars (WebDataset) and parquet files (Hugging Face)."""

import itertools
import json
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from common.data.image_folder import IMAGE_SUFFIX, SPLIT_NAME, SPLITS
from common.errors import UserError
from common.files import canonical_name
from common.shards.dataset import LABELS, read_labels
from common.shards.source import ImageListing, LabelledImage, RowPosition, TarPosition
from common.text import first_line, printable

if TYPE_CHECKING:
    from pyarrow import DataType
    from pyarrow.parquet import ParquetFile

# For tars. The order decides between images of one key, as webdataset's "jpg;jpeg;png" does; other
# kinds come last, and are refused when they are decoded.
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "tif", "tiff")


@dataclass(frozen=True)
class ParquetTable:
    """An open parquet file, its columns of images and labels, and the names of its classes."""

    file: "ParquetFile"
    images: str
    labels: str
    class_names: list[str]  # empty where the file has none


def find_containers(root: Path) -> list[str]:
    """Return the parquet files or else the tars of a source, as paths relative to `root`."""
    # A compressed tar is refused when it is listed.
    for suffix in (".parquet", ".tar", ".tar.gz"):
        # In the folder itself, or one level down as in Hugging Face's data/.
        paths = itertools.chain(root.glob(f"*{suffix}"), root.glob(f"*/*{suffix}"))
        names = sorted(path.relative_to(root).as_posix() for path in paths)
        if names:
            return names
    return []


def split_of(container: str) -> str:
    """Return the split that a word of a file's name, else of its folder's, says, or "".

    Raises `UserError` for words of several.
    """
    for name in reversed(container.lower().split("/")):
        # "train-00000-of-00002.parquet" has the words train, of and parquet.
        words = map(SPLIT_NAME.fullmatch, re.split(r"[^a-z]+", name))
        splits = sorted({SPLITS[word[1]] for word in words if word})
        if len(splits) > 1:
            raise UserError(f"{container}: named as {' and '.join(splits)}; rename it")
        if splits:
            return splits[0]
    return ""


def list_containers(root: Path, containers: list[str], split: str | None) -> ImageListing:
    """List the images of tars or parquet files for training and validation, or of one `split`.

    A word in a path names the split; where none does, all are for training. Raises `UserError` for
    an image without a label, and for labels that do not fit the class names.
    """
    chosen = _choose_containers(root, containers, split)
    class_names = read_labels(root / LABELS) if (root / LABELS).is_file() else None
    listings, class_names = _list_each(root, list(itertools.chain(*chosen.values())), class_names)
    splits = {}
    for name, members in chosen.items():
        images = itertools.chain(*[listings[member] for member in members])
        splits[name] = sorted((image.name, image.label) for image in images)
        if not splits[name]:
            raise UserError(
                f"{root}: no labelled images for the split {name} in {', '.join(containers[:3])}"
            )
    # WebDataset has numbers only: the numbers are then the names.
    if class_names is None:
        labels = {label for _, label in next(iter(splits.values()))}
        if labels != {*range(len(labels))}:
            raise UserError(
                f"{root}: labels {min(labels)} to {max(labels)} with gaps; name all in "
                f"{root / LABELS}"
            )
        class_names = [*map(str, range(len(labels)))]
    positions = {}
    for container, listing in listings.items():
        for name, label, position in listing:
            positions[name] = position
            if not 0 <= label < len(class_names):
                raise UserError(
                    f"{root / container}: {name}: label {label}, out of range for "
                    f"{len(class_names)} classes"
                )
    return ImageListing(root, class_names, splits, positions)


def _list_each(
    root: Path, containers: list[str], class_names: list[str] | None
) -> tuple[dict[str, list[LabelledImage]], list[str] | None]:
    """Return the images in each container, and the class names, which parquet files may hold."""
    listings: dict[str, list[LabelledImage]] = {}
    printed = ""
    for container in containers:
        path = root / container
        if not container.endswith(".parquet"):
            listings[container] = _list_webdataset(path, container)
            continue
        with _open_parquet(path) as table:
            listings[container] = _list_rows(table, path, container)
            others = {*table.file.schema_arrow.names} - {table.images, table.labels}
        columns = f"images of column {table.images}, labels of {table.labels}"
        if others:
            columns += f"; not used: {', '.join(sorted(others))}"
        # A hundred files usually have the same columns: print them once.
        if columns != printed:
            print(printable(f"{path}: {columns}"))
            printed = columns
        # Labels are numbers: with other names in another file they would mean other classes.
        if table.class_names and class_names not in (None, table.class_names):
            raise UserError(
                f"{path}: its class names are not those of labels.txt or an earlier file: equalise "
                "them"
            )
        class_names = table.class_names or class_names
    return _with_unique_names(listings), class_names


def _choose_containers(
    root: Path, containers: list[str], split: str | None
) -> dict[str, list[str]]:
    """Return the containers of each split that is asked for, train first."""
    by_split = defaultdict(list)
    for container in containers:
        by_split[split_of(container)].append(container)
    # Some paths name a split, and some do not.
    if by_split.keys() > {""}:
        raise UserError(
            f"{root / by_split[''][0]}: its path names no split, as the others do; rename it"
        )
    # The test split is taken on request only.
    wanted = [split or "train"]
    if not split and "validation" in by_split:
        wanted.append("validation")
    return {name: by_split.get("") or by_split.get(name, []) for name in wanted}


def _with_unique_names(
    listings: Mapping[str, list[LabelledImage]],
) -> dict[str, list[LabelledImage]]:
    """Put container and number before all names where some are equal.

    Such images lie in different folders, or each container numbers its own.
    """
    names = [image.name for listing in listings.values() for image in listing]
    if len(set(names)) == len(names):
        return dict(listings)
    # All are renamed: the split by name must not depend on which of them are equal.
    unique = {}
    for container, listing in listings.items():
        unique[container] = [
            image._replace(name=f"{container}/{number}/{image.name}")
            for number, image in enumerate(listing)
        ]
    return unique


def tar_members(path: Path, start: int = 0) -> Iterator[tuple[tarfile.TarInfo, BinaryIO]]:
    """Yield each regular member of a tar, which may begin within a file, and the open file.

    Raises `UserError` naming the member at which the tar is truncated or damaged; tarfile would
    just end there.
    """
    name = "its first member"
    with path.open("rb") as file:
        file.seek(start)
        try:
            tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
            for member in tar:
                name = member.name
                if member.isreg():
                    yield member, file
            # tarfile ends at a damaged header as at the end, which are blocks of zeros
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError
        except tarfile.TarError as error:
            raise UserError(
                f"{path}: compressed, truncated or damaged at {name}; run gunzip on it, or "
                "download it again"
            ) from error


def _list_webdataset(path: Path, container: str) -> list[LabelledImage]:
    """List a tar in which ``key.cls`` holds the label of ``key.jpg``, one image for each key."""
    images = {}
    labels = {}
    for member, file in tar_members(path):
        # A key ends at the first dot of the file's name, as in webdataset.
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        key = f"{folder}/{stem}"
        suffix = suffix.lower()
        if suffix and IMAGE_SUFFIX.fullmatch(f".{suffix}"):
            position = TarPosition(container, member.offset_data, member.size)
            rank = [*IMAGE_SUFFIXES, suffix].index(suffix)
            image = (rank, member.name, position)
            # Keep the first by suffix: masks and other views of the sample are left out.
            images[key] = min(image, images.get(key, image))
        elif suffix == "cls":
            # Read now, since it is needed to list the image, whose own bytes are read later.
            file.seek(member.offset_data)
            # A label that is no number is refused below, if it belongs to an image.
            with suppress(ValueError):
                labels[key] = int(file.read(member.size))
    listing = []
    for key, (_, name, position) in images.items():
        if key not in labels:
            raise UserError(f"{path}: {name}: no label; its sample needs a class number in a .cls")
        listing.append(LabelledImage(name, labels[key], position))
    return listing


def _list_rows(table: ParquetTable, path: Path, container: str) -> list[LabelledImage]:
    """List a parquet file; an image without a path is named by its number."""
    listing = []
    columns = [table.labels, f"{table.images}.path"]
    for group in range(table.file.num_row_groups):
        # Only these columns are read: not the images' content.
        rows = table.file.read_row_group(group, columns, use_threads=False).to_pylist()
        for number, row in enumerate(rows):
            image = row[table.images] or {}  # None is refused when it is decoded
            name = image.get("path") or f"{container}/{len(listing)}"
            label = row[table.labels]
            if label is None:
                raise UserError(
                    f"{path}: {name}: row {len(listing)} has no label; remove it or add one"
                )
            listing.append(LabelledImage(name, label, RowPosition(container, group, number)))
    return listing


def read_rows(root: Path, positions: Iterable[RowPosition]) -> dict[RowPosition, bytes]:
    """Return the images at ``positions``. Each row group, compressed as a whole, is read once."""
    by_group = defaultdict(list)
    for position in positions:
        by_group[position.container, position.row_group].append(position)
    images = {}
    for (container, group), members in sorted(by_group.items()):
        with _open_parquet(root / container) as table:
            columns = [f"{table.images}.bytes"]
            # Without threads: each worker is a process of its own.
            rows = table.file.read_row_group(group, columns, use_threads=False)[table.images]
            for position in members:
                images[position] = rows[position.row]["bytes"].as_py() or b""
    return images


@contextmanager
def _open_parquet(path: Path) -> Iterator[ParquetTable]:
    """Open a file and find its columns of images and labels, a file that datasets wrote or not."""
    import pyarrow.parquet
    from pyarrow.types import is_integer

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            # Where datasets has written the file, its metadata has the names of the classes.
            features = {}
            if b"huggingface" in (schema.metadata or {}):
                features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
            images = [column.name for column in schema if _holds_images(column.type)]
            integers = [column.name for column in schema if is_integer(column.type)]
            labels = [
                name for name in integers if name == "label" or "names" in features.get(name, {})
            ]
            if not images or not labels:
                raise UserError(
                    f"{path}: columns {', '.join(schema.names)}; a struct of bytes and path and an "
                    "integer label are needed"
                )
            # others may be a mask, or an age
            label = "label" if "label" in labels else labels[0]
            names = features.get(label, {}).get("names") or []
            yield ParquetTable(
                file,
                "image" if "image" in images else images[0],
                label,
                [canonical_name(name) for name in names],
            )
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of storage
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise UserError(f"{path}: {first_line(error)}; download it again") from error


def _holds_images(column: "DataType") -> bool:
    """Return whether a column is of structs with an image's content and path."""
    from pyarrow.types import is_struct

    return is_struct(column) and {"bytes", "path"} <= {field.name for field in column}
