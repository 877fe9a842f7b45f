"""A prepared data set: open it with cheap checks, read records of it.

train/  validation/              TFRecord shards
records/<split>.npy              one `RECORD` row for each image, in shard order
labels.txt                       one class name a line; the line number, from 0, is the label
manifest.json                    checksums of shards and tables; written last
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from mmap import mmap
from pathlib import Path
from typing import Any, Literal

import numpy as np

from common.data.image_folder import check_class_names
from common.data.image_split import ImageSplit, Record
from common.errors import UserError
from common.files import (
    Count,
    Schema,
    fingerprint_of,
    read_json,
    read_names,
    read_range,
    regular_size,
    sha256_of,
)
from common.shards.tfrecord_format import BadSampleError, read_filename, unframe

FORMAT = 1
MANIFEST = "manifest.json"
LABELS = "labels.txt"
PARTIAL = ".partial"  # the job and a report per finished shard, while preparation runs
REMEDY = "copy the data set again, or delete it and prepare it again"

RECORD = np.dtype(
    [
        ("shard", "<u4"),  # number of the shard within its split
        ("offset", "<u8"),  # first byte of the framed record in the shard, and its size
        ("size", "<u4"),
        ("image_start", "<u4"),  # first byte of the JPEG, from `offset`
        ("image_size", "<u4"),
        ("label", "<i4"),  # counted from 0; the shard may store another base
        ("height", "<u4"),
        ("width", "<u4"),
    ]
)


class ShardEntry(Schema):
    name: str
    bytes: Count
    records: Count
    sha256: str


class SplitEntry(Schema):
    records: Count
    records_sha256: str
    shards: list[ShardEntry]


class Manifest(Schema):
    """manifest.json."""

    format: Literal[1]
    num_classes: int
    label_base: Literal[0, 1]
    splits: dict[str, SplitEntry]
    made: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """A checksum over the content of all splits, wherever the data set lies."""
        splits = []
        for _, entry in sorted(self.splits.items()):
            shards = [shard.sha256 for shard in entry.shards]
            splits.append(fingerprint_of([entry.records_sha256, *shards]))
        return fingerprint_of(splits)


@dataclass(eq=False)
class TFRecordSplit(ImageSplit):
    """One split of a prepared data set, as `open_split` returns it."""

    _: KW_ONLY
    name: str
    shards: Sequence[Path]
    records: np.ndarray  # rows of `RECORD`, memory-mapped
    manifest: Manifest

    is_prepared = True  # for adopted shards too: no decoder here turns a record as its EXIF says

    def __getstate__(self) -> dict[str, Any]:
        """Name the table for another process to map, which needs no copy then."""
        state = self.__dict__.copy()
        # A part of a table has another base.
        if isinstance(self.records, np.memmap) and isinstance(self.records.base, mmap):
            state |= dict(records=self.records.filename, labels=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.labels is None:
            self.records = np.load(state["records"], mmap_mode="r")
            self.labels = self.records["label"]

    @property
    def fingerprint(self) -> str:
        """The checksum over all splits of the data set."""
        return self.manifest.fingerprint

    @property
    def made_from(self) -> str:
        return str(self.manifest.made.get("source", ""))

    def read(self, index: int) -> tuple[bytes | memoryview, int]:
        """Return ``(JPEG bytes, label)`` of one image, its checksum verified."""
        (record,) = self.read_span(index, index + 1)
        if isinstance(record, UserError):
            raise record
        return record

    def read_span(self, first: int, end: int) -> list[Record]:
        """Return what `read` does for consecutive records of one shard, in one read of the file."""
        # Python's integers: NumPy's are slow one by one.
        rows = self.records[first:end].tolist()
        # All lie in one shard, one after the other: a block never crosses shards.
        shard, start, *_ = rows[0]
        _, last, size, *_ = rows[-1]
        view = memoryview(read_range(self.shards[shard], start, last + size - start))
        records: list[Record] = []
        for index, (_, offset, size, image_start, image_size, label, *_) in enumerate(rows, first):
            data = view[offset - start :]
            try:
                unframe(data[:size])
                # A view, without a copy; it keeps the bytes of the whole span in memory.
                records.append((data[image_start : image_start + image_size], label))
            except BadSampleError as error:
                records.append(self.fault(index, error))
        return records

    def block_bounds(self, nbytes: int) -> np.ndarray:
        """Return the first record of each block, and the number of records.

        Shards are cut into blocks of about equal size, at most ``nbytes`` and a part of a record.
        """
        # Signed: differences of unsigned numbers would wrap around. N records, S shards.
        shards_N = self.records["shard"].astype(np.int64)
        offsets_N = self.records["offset"].astype(np.int64)
        ends_S = np.zeros(len(self.shards), np.int64)
        np.maximum.at(ends_S, shards_N, offsets_N + self.records["size"])
        blocks_S = -(-ends_S // nbytes)
        # The block, within its shard, that a record's first byte is in.
        block_N = offsets_N * blocks_S[shards_N] // ends_S[shards_N]
        # A block starts where the shard or the block within it changes.
        starts = np.flatnonzero(np.diff(shards_N) | np.diff(block_N)) + 1
        return np.concatenate([[0], starts, [len(self)]])

    def span_bytes(self, first: int, end: int) -> int:
        """Return the size of consecutive records."""
        return int(self.records["size"][first:end].sum(dtype=np.int64))

    def fault(self, index: int, reason: object) -> UserError:
        """Return the error that names the record of an image and the reason."""
        return UserError(f"{self._place(index)}: {reason}; {REMEDY}")

    def name_image(self, index: int) -> str:
        """Return the file that a record was made of, and where the record is."""
        row = self.records[index]
        record = read_range(self.shards[row["shard"]], int(row["offset"]), int(row["size"]))
        name = ""
        with suppress(BadSampleError):
            name = read_filename(unframe(record))
        return f"{name}, {self._place(index)}" if name else self._place(index)

    def _place(self, index: int) -> str:
        row = self.records[index]
        shard = self.shards[row["shard"]]
        return f"{shard}: record {index} of {self.name} at byte {row['offset']}"


def open_split(root: Path, split: str) -> TFRecordSplit:
    """Open one split of the data set in a folder; the shards themselves are not read.

    Raises `UserError` naming the first file that is missing or differs from the manifest.
    """
    manifest = read_manifest(root)
    if split not in manifest.splits:
        remedy = f"--split names another, and prepare --split {split} writes one"
        raise UserError(f"{root}: no {split} split, only {', '.join(manifest.splits)}; {remedy}")
    entries = manifest.splits[split].shards
    # Names and sizes only: --check hashes, and each record's checksum is verified as it is read.
    for fault in find_faults(root, entries):
        raise UserError(f"{fault}; {REMEDY}")
    records = read_table(root, manifest, split)
    return TFRecordSplit(
        class_names=read_labels(root / LABELS, manifest.num_classes),
        labels=records["label"],
        description=f"the prepared {split} split",
        held_out=manifest.made.get("held_out") or "",
        name=split,
        shards=[root / entry.name for entry in entries],
        records=records,
        manifest=manifest,
    )


def find_faults(root: Path, entries: Sequence[ShardEntry]) -> Iterator[str]:
    """Yield a line for each shard that is missing or has another size than in the manifest."""
    for entry in entries:
        path = root / entry.name
        try:
            size = regular_size(path)
        except UserError:
            yield f"{path}: missing"
            continue
        if size != entry.bytes:
            yield f"{path}: {size} bytes, not {entry.bytes} as in the manifest"


def read_manifest(root: Path) -> Manifest:
    """Return the manifest of the prepared data set at `root`; raise `UserError` without one."""
    path = root / MANIFEST
    if not path.is_file():
        if not root.is_dir():
            raise UserError(f"{root}: no such folder; name the folder of a prepared data set")
        if (root / PARTIAL).is_dir():
            raise UserError(
                f"{path}: missing, preparation was stopped; rerun the command to finish it"
            )
        raise UserError(
            f"{path}: missing; run `python scripts/prepare.py SOURCE DEST` and name DEST, or "
            f"`python scripts/prepare.py --adopt {root}` if these are shards; folders of "
            "images are read as they are with --set DATA.loader=torchvision"
        )
    return read_json(path, Manifest)


def read_labels(path: Path, count: int | None = None) -> list[str]:
    """Return the class names in a file with one on each line; empty lines at its end are none.

    Raises `UserError` for names that cannot be used, and if there are not ``count``, the manifest's
    number of classes.
    """
    names = read_names(path)
    check_class_names(names, path)
    if count not in (None, len(names)):
        raise UserError(f"{path}: {len(names)} names, not {count} as in the manifest; {REMEDY}")
    return names


def read_table(root: Path, manifest: Manifest, split: str) -> np.ndarray:
    """Return the `RECORD` rows of a split, memory-mapped.

    Raises `UserError` if they differ from the manifest.
    """
    table = root / "records" / f"{split}.npy"
    if not table.is_file() or sha256_of(table) != manifest.splits[split].records_sha256:
        raise UserError(f"{table}: missing, or differs from the manifest; {REMEDY}")
    # Memory-mapped: the processes of a host share one copy, 46 MB for ImageNet.
    return np.load(table, mmap_mode="r")
