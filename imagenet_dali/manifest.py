"""The files of a prepared data set, and checks that they are unchanged.

train/  validation/              TFRecord shards
records/<split>.npy              one `RECORD` row for each image, in shard order
labels.txt                       one class name a line; the line number, from 0, is the label
manifest.json                    checksums of shards and tables, and what repairs left out; written last
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, FailFast, Field

from common.data.image_folder import check_class_names
from common.errors import UNPRINTABLE, UserError
from common.files import Count, Schema, fingerprint_of, read_json, read_text, sha256_of
from common.object_store import FileState, list_files, local_copy
from imagenet_dali.records import RECORD

FORMAT = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"  # the job and a report per finished shard, while preparation runs
REPAIR = "run `python -m imagenet_dali.prepare --check --repair {root}` to continue without the bad records"


def _stay_inside(name: str) -> str:
    """Refuse a name that leads out of the data set: repairs derive paths from it."""
    if Path(name).is_absolute() or ".." in Path(name).parts or UNPRINTABLE.search(name):
        raise ValueError(f"{name!r} is no path inside the data set")
    return name


class ShardEntry(Schema):
    name: Annotated[str, AfterValidator(_stay_inside)]
    bytes: Count
    records: Count
    sha256: str
    index_sha256: str = Field("", exclude=True)  # of older data sets: an index for DALI's own reader


class SplitEntry(Schema):
    records: Count
    records_sha256: str
    shards: Annotated[list[ShardEntry], FailFast(), Field(min_length=1)]


class RepairEntry(Schema):
    fingerprint: str
    records: Count
    dropped: Annotated[list[str], FailFast()]


class Manifest(Schema):
    """manifest.json."""

    format: Literal[1]
    num_classes: int = Field(ge=1, le=10**8)
    label_base: Literal[0, 1]
    splits: dict[Literal["train", "validation"], SplitEntry]
    made: dict[str, Any]
    repairs: Annotated[list[RepairEntry], FailFast()] = Field([])


def copy_back(root: Path) -> str:
    """Return the remedy for what cannot be repaired."""
    again = f"delete {root} and rerun `python -m imagenet_dali.prepare SOURCE {root}`"
    return f"copy it from where the data set came from, or {again}"


def read_manifest(root: Path) -> dict[str, Any]:
    """Return the manifest of the prepared data set at `root`; raise `UserError` with the remedy if there is none."""
    path = root / MANIFEST
    if not path.is_file():
        if not root.is_dir():
            raise UserError(f"{root}: no such folder; name the folder of a prepared data set")
        if (root / PARTIAL).is_dir():
            raise UserError(f"{path}: missing, preparation was stopped; rerun the command to finish it")
        if any(found.is_file() for found in (*root.glob("train/*"), *root.glob("train-*"))):
            raise UserError(
                f"{path}: missing; run `python -m imagenet_dali.prepare --adopt {root}` if these are shards"
            )
        raise UserError(f"{path}: missing; run `python -m imagenet_dali.prepare SOURCE DEST` and name DEST")
    try:
        return read_json(path, Manifest).model_dump(exclude_unset=True)
    except UserError as error:
        raise UserError(f"{error}; prepare the data set again") from error


def read_labels(path: Path) -> list[str]:
    """Return the class names in a file with one on each line; empty lines at its end are none."""
    names = read_text(path).rstrip("\r\n").splitlines()
    check_class_names(names, path)
    return names


def split_fingerprint(described: Mapping[str, Any]) -> str:
    """Return a checksum over the content of a split's shards and table."""
    return fingerprint_of([described["records_sha256"], *(shard["sha256"] for shard in described["shards"])])


def data_fingerprint(manifest: Mapping[str, Any]) -> str:
    """Return a checksum over the content of all splits, independent of their location."""
    return fingerprint_of(split_fingerprint(described) for _, described in sorted(manifest["splits"].items()))


def list_shards(root: Path, manifest: Mapping[str, Any], split: str) -> dict[str, FileState]:
    """Return the state of those shards of a split that are there, by their names."""
    return list_files(root, [shard["name"] for shard in manifest["splits"][split]["shards"]])


def find_faults(
    root: Path, manifest: Mapping[str, Any], split: str, found: Mapping[str, FileState]
) -> Iterator[tuple[str, bool]]:
    """Yield a line for each file of a split that is missing or has another size, and whether a repair helps."""
    labels, num_classes = root / "labels.txt", manifest["num_classes"]
    if not labels.is_file() or len(read_labels(labels)) != num_classes:
        yield f"{labels}: missing or not {num_classes} lines; {copy_back(root)}", False
    for shard in manifest["splits"][split]["shards"]:
        path, state = root / shard["name"], found.get(shard["name"])
        if not state:
            yield f"{path}: missing; {copy_back(root)}", False
        elif state.size != shard["bytes"]:  # a sparse file may seem to have any
            is_short = state.size < shard["bytes"]
            remedy = REPAIR.format(root=root) if is_short else copy_back(root)
            yield f"{path}: {state.size} bytes, not {shard['bytes']} as in the manifest; {remedy}", is_short


def read_table(root: Path, manifest: Mapping[str, Any], split: str) -> np.ndarray:
    """Return the rows of a split, memory-mapped; raise `UserError` unless they fit the manifest and the shards."""
    table, described = records_path(root, split), manifest["splits"][split]
    if not table.is_file():
        raise UserError(f"{table}: missing")
    with local_copy(table) as local:
        # a table has no more bytes than so many rows and a header take
        is_small = local.stat().st_size < 4096 + RECORD.itemsize * described["records"]
        if not is_small or sha256_of(local) != described["records_sha256"]:
            raise UserError(f"{table}: differs from the manifest")
        try:
            rows: np.ndarray = np.load(local, mmap_mode="r")  # which refuses pickled objects
        except Exception:  # of a broken header numpy raises what tokenize and ast do, too
            rows = np.empty(0)
    if rows.dtype != RECORD or rows.ndim != 1:
        raise UserError(f"{table}: not a table of records")
    _check_rows(table, rows, described["shards"], manifest["num_classes"])
    return rows


def _check_rows(table: Path, rows: np.ndarray, shards: Sequence[Mapping[str, Any]], num_classes: int) -> None:
    counts = [shard["records"] for shard in shards]
    fits = 0 < len(rows) == sum(counts) and np.array_equal(rows["shard"], np.repeat(np.arange(len(counts)), counts))
    if not fits:
        raise UserError(f"{table}: {len(rows)} rows, not {sum(counts)} in {len(counts)} shards as in the manifest")
    labels = rows["label"]
    if labels.min() < 0 or labels.max() >= num_classes:
        raise UserError(f"{table}: labels {labels.min()} to {labels.max()}, out of range for {num_classes} classes")
    sizes = np.array([shard["bytes"] for shard in shards], np.uint64)[rows["shard"]]
    columns = {name: rows[name].astype(np.uint64) for name in ("offset", "size", "image_start", "image_size")}
    inside = (columns["offset"] <= sizes) & (columns["size"] <= sizes - columns["offset"])
    inside &= columns["image_start"] + columns["image_size"] <= columns["size"]
    if not inside.all():
        raise UserError(f"{table}: row {inside.argmin()} lies outside its shard")


def records_path(root: Path, split: str) -> Path:
    """Return the path of the record table of a split."""
    return root / "records" / f"{split}.npy"
