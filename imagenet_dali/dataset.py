"""A prepared data set: open it with cheap checks, read one image of it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from common.errors import UserError
from imagenet_dali.manifest import (
    COPY_BACK,
    REPAIR,
    find_faults,
    find_missing,
    read_labels,
    read_manifest,
    records_path,
    split_fingerprint,
)
from imagenet_dali.records import BadRecordError, unframe


@dataclass(frozen=True)
class Split:
    """One split of a prepared data set, opened by `open_split`."""

    is_upright: ClassVar[bool] = True  # preparation has applied EXIF orientations
    root: Path
    name: str
    shards: list[Path]
    records: np.ndarray  # of RECORD, memory-mapped
    class_names: list[str]
    fingerprint: str  # of the content of shards and table, independent of their location

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
        """Return the error that names the record of an image and the reason."""
        row = self.records[index]
        place = f"{self.shards[row['shard']]}: record {index} of {self.name} at byte {row['offset']}"
        return UserError(f"{place}: {reason}; {REPAIR.format(root=self.root)}")


def read_record(path: Path, row: np.void) -> bytes:
    """Return the framed record that `row` points to, unchecked."""
    # opened per record: one descriptor for each of ImageNet's 1,064 shards would exceed the usual limit of 1,024
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, int(row["size"]), int(row["offset"]))
    finally:
        os.close(descriptor)


def open_split(root: Path | str, split: str) -> Split:
    """Open one split; its files are compared with the manifest, without reading the shards.

    Raises `UserError` naming the first file that is missing or differs.
    """
    root = Path(root)
    manifest = read_manifest(root)
    if split not in manifest["splits"]:
        raise UserError(
            f"{root}: no {split} split, only {', '.join(manifest['splits'])}; prepare the data set with one"
        )
    for fault in find_missing(root, manifest, split):
        raise UserError(f"{fault}; {COPY_BACK}")
    for fault in find_faults(root, manifest, split):
        raise UserError(f"{fault}; {REPAIR.format(root=root)}")
    described = manifest["splits"][split]
    return Split(
        root=root,
        name=split,
        shards=[root / shard["name"] for shard in described["shards"]],
        records=np.load(records_path(root, split), mmap_mode="r"),
        class_names=read_labels(root / "labels.txt"),
        fingerprint=split_fingerprint(described),
    )
