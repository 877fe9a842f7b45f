"""The files of a prepared data set, and checks that they are unchanged.

train/  validation/              TFRecord shards
idx_files/<split>/<shard>.idx    DALI's index of each shard
records/<split>.npy              one `RECORD` row for each image, in shard order
labels.txt                       one class name a line; the line number, from 0, is the label
manifest.json                    checksums of all of these, and what repairs left out; written last
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.files import fingerprint_of, sha256_of
from imagenet_dali.records import RECORD

FORMAT = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"  # the job and a report per finished shard, while preparation runs
REPAIR = "run `python -m imagenet_dali.prepare --check --repair {root}` to continue without the bad records"
COPY_BACK = "copy it from where the data set came from, or prepare the images again"


def read_manifest(root: Path) -> dict[str, Any]:
    """Return the manifest of the prepared data set at `root`; raise `UserError` with the remedy if there is none."""
    path = root / MANIFEST
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; name the folder of a prepared data set")
    if not path.is_file():
        if (root / PARTIAL).is_dir():
            raise UserError(f"{path}: missing, preparation was stopped; rerun the command to finish it")
        if any(found.is_file() for found in (*root.glob("train/*"), *root.glob("train-*"))):
            raise UserError(
                f"{path}: missing; run `python -m imagenet_dali.prepare --adopt {root}` if these are shards"
            )
        raise UserError(f"{path}: missing; run `python -m imagenet_dali.prepare SOURCE DEST` and name DEST")
    try:
        manifest = json.loads(path.read_text())
        version = manifest["format"]
        if version == FORMAT:
            _check_names(manifest["splits"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a manifest; prepare the data set again") from error
    if version != FORMAT:
        raise UserError(f"{path}: format {version}, not {FORMAT}; prepare the data set again")
    return manifest


def _check_names(splits: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a name that leads out of the data set: repairs derive paths from them."""
    for name in (*splits, *(shard["name"] for described in splits.values() for shard in described["shards"])):
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or (name in splits and len(path.parts) != 1):
            raise ValueError(name)


def split_fingerprint(described: Mapping[str, Any]) -> str:
    """Return a checksum over the content of a split's shards and table."""
    return fingerprint_of([described["records_sha256"], *(shard["sha256"] for shard in described["shards"])])


def data_fingerprint(manifest: Mapping[str, Any]) -> str:
    """Return a checksum over the content of all splits, independent of their location."""
    return fingerprint_of(split_fingerprint(described) for _, described in sorted(manifest["splits"].items()))


def earlier_fingerprints(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fingerprints that the data set had before each of its repairs."""
    return tuple(repair["fingerprint"] for repair in manifest.get("repairs", ()))


def find_missing(root: Path, manifest: Mapping[str, Any], split: str) -> Iterator[str]:
    """Yield a line for each missing file of a split that cannot be derived from the others."""
    labels, num_classes = root / "labels.txt", manifest["num_classes"]
    if not labels.is_file() or len(labels.read_text().splitlines()) != num_classes:
        yield f"{labels}: missing or not {num_classes} lines"
    for shard in manifest["splits"][split]["shards"]:
        if not (root / shard["name"]).is_file():
            yield f"{root / shard['name']}: missing"


def find_faults(root: Path, manifest: Mapping[str, Any], split: str) -> Iterator[str]:
    """Yield a line for each file that does not match the manifest, by sizes and tables; shards are not read."""
    described = manifest["splits"][split]
    for shard in described["shards"]:
        path, index = root / shard["name"], index_path(root, split, shard["name"])
        if path.is_file() and path.stat().st_size != shard["bytes"]:
            yield f"{path}: {path.stat().st_size} bytes, not {shard['bytes']} as in the manifest"
        if not index.is_file():
            yield f"{index}: missing, the shard has no index"
        elif sha256_of(index) != shard["index_sha256"]:
            lines = len(index.read_text(errors="replace").splitlines())
            yield f"{index}: does not fit its shard ({lines} lines for {shard['records']} records, or other offsets)"
    table = records_path(root, split)
    if not table.is_file():
        yield f"{table}: missing"
    elif sha256_of(table) != described["records_sha256"]:
        yield f"{table}: differs from the manifest"
    else:
        yield from _find_table_faults(table, described, manifest["num_classes"])


def _find_table_faults(table: Path, described: Mapping[str, Any], num_classes: int) -> Iterator[str]:
    counts = [shard["records"] for shard in described["shards"]]
    try:
        rows: np.ndarray = np.load(table, mmap_mode="r")  # which refuses pickled objects
    except ValueError:
        rows = np.empty(0)
    if rows.dtype != RECORD:
        yield f"{table}: not a table of records"
    elif len(rows) == 0 or np.bincount(rows["shard"], minlength=len(counts)).tolist() != counts:
        yield f"{table}: {len(rows)} rows, not {sum(counts)} in {len(counts)} shards as in the manifest"
    elif rows["label"].min() < 0 or rows["label"].max() >= num_classes:
        yield f"{table}: labels {rows['label'].min()} to {rows['label'].max()}, out of range for {num_classes} classes"


def records_path(root: Path, split: str) -> Path:
    """Return the path of the record table of a split."""
    return root / "records" / f"{split}.npy"


def index_path(root: Path, split: str, shard_name: str) -> Path:
    """Return the path of the DALI index of a shard."""
    return root / "idx_files" / split / f"{Path(shard_name).name}.idx"
