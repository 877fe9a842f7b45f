"""Verify every record of a data set."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from common.errors import UserError, counted
from common.files import sha256_of
from common.object_store import local_copy
from imagenet_dali.dataset import read_range
from imagenet_dali.images import BadImageError, check_jpeg
from imagenet_dali.manifest import find_faults, list_shards, read_manifest, read_table
from imagenet_dali.records import RECORD, BadRecordError, parse_example, scan, unframe
from imagenet_dali.workers import parallel_map
from imagenet_dali.writer import Shard

Verified = tuple[Shard, list[str]]  # the shard with its good rows, and a line for each bad record
Task = tuple[Path, str, np.ndarray | None, range]  # root, name of the shard, its rows of the table, labels as stored
ANY_LABEL = range(2**31)


def inspect_record(record: bytes, offset: int, labels: range) -> tuple[int, ...]:
    """Return the `RECORD` row of one framed record, its label counted from 0; ``labels`` are those allowed as stored.

    Raises `BadRecordError` or `BadImageError`.
    """
    image, label = parse_example(unframe(record))
    if label not in ANY_LABEL:
        raise BadRecordError(f"label {label} is no class number")
    if label not in labels:
        raise BadRecordError(f"label {label}, out of range for {len(labels)} classes from {labels.start}")
    height, width, color_space = check_jpeg(image)
    if color_space not in ("YCbCr", "Gray", "RGB"):
        raise BadImageError(f"{color_space} JPEG, which decoders turn into different colours")
    return 0, offset, len(record), record.find(image), len(image), label - labels.start, height, width


def inspect_shard(task: Task) -> Verified:
    """Verify the records of a shard: those in its table, or all up to the last that can be found."""
    with local_copy(task[0] / task[1]) as local:
        return _inspect(local, *task)


def _inspect(local: Path, root: Path, name: str, rows: np.ndarray | None, labels: range) -> Verified:
    path = root / name
    good, faults, number, end = [], [], 0, 0
    if rows is not None:
        rows, cut = np.split(rows, [np.searchsorted(rows["offset"] + rows["size"], local.stat().st_size, side="right")])
    try:
        for offset, record in scan(local) if rows is None else _read_rows(local, rows):
            try:
                row = inspect_record(record, offset, labels)
                if rows is not None and row[1:] != rows[number].item()[1:]:
                    raise BadRecordError("differs from the record table")
                good.append(row)
            except (BadRecordError, BadImageError) as error:
                faults.append(describe_fault(path, number, offset, error))
            number, end = number + 1, offset + len(record)
    except BadRecordError as error:
        faults.append(describe_fault(path, number, end, error))
    if rows is not None and len(cut):
        faults.append(
            describe_fault(path, number, end, f"the shard is cut off here: {counted(len(cut), 'record')} lost")
        )
    return Shard(name, sha256_of(local), np.array(good, RECORD)), faults


def _read_rows(path: Path, rows: np.ndarray) -> Iterator[tuple[int, bytes]]:
    for _, offset, size, *_ in rows.tolist():
        yield offset, read_range(path, offset, size)


def describe_fault(path: Path, number: int, offset: int, error: object) -> str:
    """Return the line that names a record of a shard and what is wrong with it."""
    return f"{path}: record {number} at byte {offset}: {error}"


def inspect_shards(tasks: Sequence[Task], workers: int) -> dict[str, Verified]:
    """Call `inspect_shard` with each of ``tasks``, in parallel; return the answers by the shard's name."""
    results = tqdm(parallel_map(inspect_shard, tasks, workers), total=len(tasks), unit="shard", disable=None)
    return {shard.name: (shard, faults) for shard, faults in results}


def check(root: Path, workers: int) -> list[str]:
    """Compare every byte of a prepared data set with its manifest; return a line for each fault."""
    manifest = read_manifest(root)
    faults = []
    for split in manifest["splits"]:
        found = list_shards(root, manifest, split)
        faults += (fault for fault, is_repairable in find_faults(root, manifest, split, found) if not is_repairable)
        try:
            read_table(root, manifest, split)
        except UserError as error:
            faults.append(str(error))
    for split, verified in verify_shards(root, manifest, workers).items():
        known = {shard["name"]: shard["sha256"] for shard in manifest["splits"][split]["shards"]}
        for shard, bad in verified:
            if shard.sha256 != known[shard.name] and not bad:
                faults.append(f"{root / shard.name}: content differs from the manifest (sha256)")
            faults += bad
    return faults


def verify_shards(root: Path, manifest: Mapping[str, Any], workers: int) -> dict[str, list[Verified]]:
    """Verify every record of each split's shards, by the split's table if that matches the manifest.

    Shards that are missing, or larger than the manifest says, are left out.
    """
    labels = range(manifest["label_base"], manifest["label_base"] + manifest["num_classes"])
    splits = {split: described["shards"] for split, described in manifest["splits"].items()}
    tasks = []
    for split, shards in splits.items():
        table, there = find_table(root, manifest, split), list_shards(root, manifest, split)
        for number, shard in enumerate(shards):
            if (state := there.get(shard["name"])) and state.size <= shard["bytes"]:
                tasks.append((root, shard["name"], None if table is None else table[table["shard"] == number], labels))
    found = inspect_shards(tasks, workers)
    return {
        split: [found[shard["name"]] for shard in shards if shard["name"] in found] for split, shards in splits.items()
    }


def find_table(root: Path, manifest: Mapping[str, Any], split: str) -> np.ndarray | None:
    """Return the rows of a split, or None if its table does not match the manifest."""
    try:
        return read_table(root, manifest, split)
    except UserError:
        return None
