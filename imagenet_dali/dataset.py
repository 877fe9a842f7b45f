"""A prepared data set: open it with cheap checks, read one image of it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from common.data.block_cache import BlockCache
from common.errors import UserError
from common.object_store import StorePath, as_path
from imagenet_dali.manifest import (
    REPAIR,
    find_faults,
    list_shards,
    read_labels,
    read_manifest,
    read_table,
    split_fingerprint,
)
from imagenet_dali.records import BadRecordError, unframe


@dataclass(frozen=True)
class Split:
    """One split of a prepared data set, opened by `open_split`."""

    is_prepared: ClassVar[bool] = True  # RGB JPEGs, turned as their EXIF blocks said
    root: Path
    name: str
    shards: list[Path]
    records: np.ndarray  # of RECORD, memory-mapped
    class_names: list[str]
    fingerprint: str  # of the content of shards and table, independent of their location
    versions: Sequence[str | None] = ()  # ETags of the shards, which must not change; for objects only
    cache: BlockCache | None = None

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self.records)

    def read(self, index: int) -> tuple[memoryview, int]:
        """Return ``(JPEG bytes, label)`` of one image, its checksum verified; safe to call from many threads."""
        (record,) = self.read_span(index, index + 1)
        if isinstance(record, UserError):
            raise record
        return record

    def read_span(self, first: int, end: int) -> list[tuple[memoryview, int] | UserError]:
        """Return what `read` does for each of consecutive records of a shard, read at once; errors are not raised."""
        rows = self.records[first:end].tolist()
        shard, start = rows[0][0], min(offset for _, offset, *_ in rows)
        length = max(offset + size for _, offset, size, *_ in rows) - start
        key = f"{self.fingerprint}/{shard}/{start}/{length}"

        def fetch() -> bytes:
            path = self.shards[shard]
            if isinstance(path, StorePath):
                return path.read_range(start, length, self.versions[shard])
            return read_range(path, start, length)

        try:
            data = self.cache.read(key, fetch) if self.cache else memoryview(fetch())
        except OSError as error:
            return [self.fault(index, error) for index in range(first, end)]
        records = [self._unpack(index, row, data[row[1] - start :]) for index, row in enumerate(rows, first)]
        if self.cache and any(isinstance(record, UserError) for record in records):
            self.cache.drop(key)  # or a shard that is restored would still be read as it was
        return records

    def _unpack(self, index: int, row: tuple[int, ...], data: memoryview) -> tuple[memoryview, int] | UserError:
        _, _, size, image_start, image_size, label, *_ = row
        if len(data) < size:
            return self.fault(index, "the shard is shorter than its index")
        try:
            unframe(data[:size])
        except BadRecordError as error:
            return self.fault(index, error)
        return data[image_start : image_start + image_size], label

    def block_bounds(self, nbytes: int) -> np.ndarray:
        """Return the first record of each block, and the number of records.

        Shards are cut into blocks of about equal size, at most ``nbytes`` and a part of a record.
        """
        shards, offsets, sizes = (self.records[name].astype(np.int64) for name in ("shard", "offset", "size"))
        ends = np.zeros(len(self.shards), np.int64)
        np.maximum.at(ends, shards, offsets + sizes)
        blocks = offsets * -(-ends // nbytes)[shards] // ends[shards]
        starts = np.flatnonzero(np.diff(shards) | np.diff(blocks)) + 1
        return np.concatenate([[0], starts, [len(self)]])

    @property
    def is_remote(self) -> bool:
        return isinstance(self.root, StorePath)

    @property
    def nbytes(self) -> int:
        """Size of all records."""
        return self.span_bytes(0, len(self))

    def span_bytes(self, first: int, end: int) -> int:
        """Return the size of consecutive records."""
        return int(self.records["size"][first:end].sum(dtype=np.int64))

    @property
    def is_shuffled(self) -> bool:
        """Whether labels do not follow each other in runs, as in shards of other tools that are sorted by class."""
        labels = self.records["label"]
        by_chance = np.square(np.bincount(labels) / len(labels)).sum()
        is_mixed = np.mean(labels[1:] == labels[:-1]) < (1 + by_chance) / 2
        return bool(len(labels) < 100 or is_mixed or by_chance == 1)  # NumPy's own would be "True" in config.json

    def fault(self, index: int, reason: object) -> UserError:
        """Return the error that names the record of an image and the reason."""
        row = self.records[index]
        place = f"{self.shards[row['shard']]}: record {index} of {self.name} at byte {row['offset']}"
        return UserError(f"{place}: {reason}; {REPAIR.format(root=self.root)}")


def read_range(path: Path, offset: int, length: int) -> bytes:
    """Return a part of a shard; it is shorter than ``length`` where the shard ends."""
    # opened for each: one descriptor for each of ImageNet's 1,064 shards would exceed the usual limit of 1,024
    descriptor = os.open(path, os.O_RDONLY)
    try:
        data = os.pread(descriptor, length, offset)
        while len(data) < length and (more := os.pread(descriptor, length - len(data), offset + len(data))):
            data += more
        return data
    finally:
        os.close(descriptor)


def open_split(root: Path | str, split: str, cache: BlockCache | None = None) -> Split:
    """Open one split; its files are compared with the manifest, without reading the shards.

    Raises `UserError` naming the first file that is missing or differs.
    """
    root = as_path(root)
    manifest = read_manifest(root)
    if split not in manifest["splits"]:
        raise UserError(
            f"{root}: no {split} split, only {', '.join(manifest['splits'])}; prepare the data set with one"
        )
    found = list_shards(root, manifest, split)
    for fault, _ in find_faults(root, manifest, split, found):
        raise UserError(fault)
    try:
        records = read_table(root, manifest, split)
    except UserError as error:
        raise UserError(f"{error}; {REPAIR.format(root=root)}") from error
    described = manifest["splits"][split]
    names = [shard["name"] for shard in described["shards"]]
    return Split(
        root=root,
        name=split,
        shards=[root / name for name in names],
        records=records,
        class_names=read_labels(root / "labels.txt"),
        fingerprint=split_fingerprint(described),
        versions=[found[name].version for name in names],
        cache=cache,
    )
