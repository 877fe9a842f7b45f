"""Images inside the parquet files of Hugging Face's datasets library: list them, and read some."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError, first_line
from common.files import regular_size
from imagenet_dali.tar_source import Member, Place

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

MAX_GROUP_BYTES = 1 << 32  # of a row group, which is read whole


def list_parquet(root: Path, container: str) -> list[Member]:
    """Return the images of a parquet file; without a path a row's number is its name."""
    path, found = root / container, []
    with _open(path) as file:
        image, label_column, _ = _describe(file, path)
        for group in range(file.num_row_groups):
            labels = _read(file, group, label_column)
            names = _read(file, group, image, "path") or [None] * len(labels)
            for row, (name, label) in enumerate(zip(names, labels, strict=True)):
                name = name or f"{container}/{len(found)}"
                if label is None:
                    raise UserError(f"{path}: {name}: row {len(found)} has no label; remove it or add one")
                found.append((name, label, Place(container, group, row)))
    return found


def class_names_of(path: Path) -> list[str] | None:
    """Return the class names in the metadata of a parquet file, or None."""
    with _open(path) as file:
        return _describe(file, path)[2]


def read_rows(root: Path, places: Iterable[Place]) -> dict[Place, bytes]:
    """Return the images at ``places``; each row group is read once, since it is compressed as a whole."""
    groups = defaultdict(list)
    for place in places:
        groups[place.container, place.start].append(place)
    images = {}
    for (container, group), members in sorted(groups.items()):
        with _open(root / container) as file:
            image, *_ = _describe(file, root / container)
            contents = _read(file, group, image, "bytes", [place.size for place in members])
            images |= {place: content or b"" for place, content in zip(members, contents, strict=True)}
    return images


@contextmanager
def _open(path: Path) -> Iterator["ParquetFile"]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from error
    regular_size(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: {first_line(error)}; download it again") from error


def _describe(file: "ParquetFile", path: Path) -> tuple[str, str, list[str] | None]:
    """Return the columns of images, which are structs with a field ``bytes``, and of labels; and the class names."""
    from pyarrow.types import is_integer, is_struct

    schema, classes = file.schema_arrow, {}
    with suppress(KeyError, ValueError, TypeError, AttributeError, RecursionError):  # written by another program
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        described = ((name, feature) for name, feature in features.items() if isinstance(feature, dict))
        classes = {name: feature.get("names") for name, feature in described if feature.get("_type") == "ClassLabel"}
    images = [field.name for field in schema if is_struct(field.type) and field.type.get_field_index("bytes") >= 0]
    labels = [name for name in (*classes, "label") if name in schema.names and is_integer(schema.field(name).type)]
    if not images or not labels:
        found = ", ".join(schema.names)
        raise UserError(f"{path}: columns {found}; a struct with the field bytes and an integer label are needed")
    names = classes.get(labels[0])
    return images[0], labels[0], list(map(str, names)) if isinstance(names, list) else None


def _read(
    file: "ParquetFile", group: int, column: str, field: str | None = None, rows: Sequence[int] | None = None
) -> list:
    """Return a column of a row group, or a field of it, or some of its rows; nothing if there is no such field."""
    size = file.metadata.row_group(group).total_byte_size
    if size > MAX_GROUP_BYTES:
        raise OSError(f"row group {group} has {size:,} bytes, more than {MAX_GROUP_BYTES:,}")
    name = f"{column}.{field}" if field else column
    read = file.read_row_group(group, [name], use_threads=False).flatten()
    if name not in read.column_names:
        return []
    return read[name].to_pylist() if rows is None else [read[name][row].as_py() for row in rows]
