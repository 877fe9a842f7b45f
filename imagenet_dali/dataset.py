"""A prepared data set on disk: open it with cheap checks, read one image of it.

train/  validation/              TFRecord shards
idx_files/<split>/<shard>.idx    DALI's index of each shard
records/<split>.npy              one `RECORD` row for each image, in shard order
labels.txt                       one class name a line; the line number, from 0, is the label
manifest.json                    what belongs to the data set, with checksums; written last
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from common.errors import UserError
from imagenet_dali.records import BadRecordError, unframe

FORMAT = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"  # the job and a report for each finished shard, until preparation writes the manifest
CHECK = "run `python -m imagenet_dali.prepare --check {root}`"


@dataclass(frozen=True)
class Split:
    """One split of a prepared data set, opened by `open_split`."""

    is_upright: ClassVar[bool] = True  # preparation has turned the images
    root: Path
    name: str
    shards: list[Path]
    records: np.ndarray  # of RECORD, memory-mapped
    class_names: list[str]
    fingerprint: str  # sha256 over the content of shards and table; where they lie does not matter

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self.records)

    def read(self, index: int) -> tuple[memoryview, int]:
        """Return ``(JPEG bytes, label)`` of one image, its checksum verified; safe to call from many threads."""
        row = self.records[index]
        path = self.shards[row["shard"]]
        try:
            unframe(record := read_record(path, row))
        except (BadRecordError, OSError) as error:
            raise self.fault(index, error) from error
        start, size = int(row["image_start"]), int(row["image_size"])
        return memoryview(record)[start : start + size], int(row["label"])

    def fault(self, index: int, reason: object) -> UserError:
        """Return the error that names an image's record and what is wrong with it."""
        row = self.records[index]
        place = f"{self.shards[row['shard']]}: record {index} of {self.name} at byte {row['offset']}"
        return UserError(f"{place}: {reason}; {CHECK.format(root=self.root)}")


def read_record(path: Path, row: np.void) -> bytes:
    """Return the framed record that `row` points to, unchecked."""
    # Opened for each record: a descriptor kept for each of ImageNet's 1,064 shards passes the usual limit of 1,024.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, int(row["size"]), int(row["offset"]))
    finally:
        os.close(descriptor)


def open_split(root: Path | str, split: str) -> Split:
    """Open one split after comparing its files with the manifest, without reading the shards.

    Raises `UserError` naming the first file that is missing or differs.
    """
    root = Path(root)
    manifest = read_manifest(root)
    if split not in manifest["splits"]:
        raise UserError(
            f"{root}: no {split} split, only {', '.join(manifest['splits'])}; prepare the data set with one"
        )
    for fault in find_faults(root, manifest, split):
        raise UserError(f"{fault}; {CHECK.format(root=root)}")
    described = manifest["splits"][split]
    checksums = [described["records_sha256"], *(shard["sha256"] for shard in described["shards"])]
    return Split(
        root=root,
        name=split,
        shards=[root / shard["name"] for shard in described["shards"]],
        records=np.load(records_path(root, split), mmap_mode="r"),
        class_names=(root / "labels.txt").read_text().splitlines(),
        fingerprint=hashlib.sha256("\n".join(checksums).encode()).hexdigest(),
    )


def read_manifest(root: Path) -> dict[str, Any]:
    """Return the manifest of a prepared data set; raise `UserError` saying what to do when `root` is none."""
    path = root / MANIFEST
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; name the folder of a prepared data set")
    if not path.is_file():
        if (root / PARTIAL).is_dir():
            raise UserError(f"{path}: missing, preparation was stopped; run the same command again to finish it")
        if any(found.is_file() for found in (*root.glob("train/*"), *root.glob("train-*"))):
            raise UserError(
                f"{path}: missing; run `python -m imagenet_dali.prepare --adopt {root}` if these are shards"
            )
        raise UserError(f"{path}: missing; run `python -m imagenet_dali.prepare SOURCE DEST` and name DEST")
    try:
        manifest = json.loads(path.read_text())
        version = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a manifest; prepare the data set again") from error
    if version != FORMAT:
        raise UserError(f"{path}: format {version}, not {FORMAT}; prepare the data set again")
    return manifest


def find_faults(root: Path, manifest: dict[str, Any], split: str) -> Iterator[str]:
    """Yield a line for each file of a split that does not fit the manifest, as far as sizes and tables tell."""
    described = manifest["splits"][split]
    table = records_path(root, split)
    labels = root / "labels.txt"
    num_classes = manifest["num_classes"]
    if not labels.is_file() or len(labels.read_text().splitlines()) != num_classes:
        yield f"{labels}: missing or not {num_classes} lines"
    for shard in described["shards"]:
        path, index = root / shard["name"], index_path(root, split, shard["name"])
        if not path.is_file():
            yield f"{path}: missing"
        elif path.stat().st_size != shard["bytes"]:
            yield f"{path}: {path.stat().st_size} bytes, not {shard['bytes']} as in the manifest"
        if not index.is_file():
            yield f"{index}: missing, the shard has no index"
        elif sha256_of(index) != shard["index_sha256"]:
            lines = len(index.read_text(errors="replace").splitlines())
            yield f"{index}: does not fit its shard ({lines} lines for {shard['records']} records, or other offsets)"
    if not table.is_file():
        yield f"{table}: missing"
    elif sha256_of(table) != described["records_sha256"]:
        yield f"{table}: differs from the manifest"
    else:
        yield from _find_table_faults(np.load(table, mmap_mode="r"), table, described, num_classes)


def _find_table_faults(rows: np.ndarray, table: Path, described: dict[str, Any], num_classes: int) -> Iterator[str]:
    counts = [shard["records"] for shard in described["shards"]]
    if len(rows) == 0 or np.bincount(rows["shard"], minlength=len(counts)).tolist() != counts:
        yield f"{table}: {len(rows)} rows, not {sum(counts)} in {len(counts)} shards as in the manifest"
    elif rows["label"].min() < 0 or rows["label"].max() >= num_classes:
        yield f"{table}: labels {rows['label'].min()} to {rows['label'].max()}, out of range for {num_classes} classes"


def records_path(root: Path, split: str) -> Path:
    """Return where the record table of a split lies."""
    return root / "records" / f"{split}.npy"


def index_path(root: Path, split: str, shard_name: str) -> Path:
    """Return where the DALI index of a shard lies."""
    return root / "idx_files" / split / f"{Path(shard_name).name}.idx"


def sha256_of(path: Path) -> str:
    """Return the checksum of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
