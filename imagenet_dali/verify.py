"""Verify every record of a prepared data set."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from common.files import sha256_of
from imagenet_dali.dataset import read_record
from imagenet_dali.images import BadImageError, check_jpeg
from imagenet_dali.manifest import find_faults, find_missing, read_manifest, records_path
from imagenet_dali.records import RECORD, BadRecordError, parse_example, scan, unframe
from imagenet_dali.workers import parallel_map
from imagenet_dali.writer import Shard

Verified = tuple[Shard, list[str]]  # the shard with its good rows, and a line for each of the others


def inspect_record(record: bytes, offset: int) -> tuple[int, ...]:
    """Return the `RECORD` row of one framed record, its label as stored; raise `BadRecordError` or `BadImageError`."""
    image, label = parse_example(unframe(record))
    if not 0 <= label < 2**31:
        raise BadRecordError(f"label {label} is no class number")
    height, width, color_space = check_jpeg(image)
    if color_space not in ("YCbCr", "Gray", "RGB"):
        raise BadImageError(f"{color_space} JPEG, which decoders turn into different colours")
    return 0, offset, len(record), record.find(image), len(image), label, height, width


def inspect_shard(root: Path, name: str) -> Verified:
    """Verify the records of a shard, up to the last that can be found."""
    path = root / name
    rows, faults, number, end = [], [], 0, 0
    try:
        for offset, record in scan(path):
            try:
                rows.append(inspect_record(record, offset))
            except (BadRecordError, BadImageError) as error:
                faults.append(describe_fault(path, number, offset, error))
            number, end = number + 1, offset + len(record)
    except BadRecordError as error:
        faults.append(describe_fault(path, number, end, error))
    return Shard(name, sha256_of(path), np.array(rows, RECORD)), faults


def describe_fault(path: Path, number: int, offset: int, error: object) -> str:
    """Return the line that names a record of a shard and what is wrong with it."""
    return f"{path}: record {number} at byte {offset}: {error}"


def find_bad_labels(path: Path, rows: np.ndarray, base: int, num_classes: int) -> tuple[np.ndarray, list[str]]:
    """Return which rows have a label out of range, and a line for each; `base` is the first label as stored."""
    is_bad = (rows["label"] < 0) | (rows["label"] >= num_classes)
    allowed = f"out of range for {num_classes} classes from {base}"
    lines = [
        describe_fault(path, int(number), rows["offset"][number], f"label {rows['label'][number] + base}, {allowed}")
        for number in np.flatnonzero(is_bad)
    ]
    return is_bad, lines


def check(root: Path, workers: int) -> list[str]:
    """Compare every byte of a prepared data set with its manifest; return a line for each fault."""
    manifest = read_manifest(root)
    faults = []
    for split in manifest["splits"]:
        faults += (*find_missing(root, manifest, split), *find_faults(root, manifest, split))
    verified = verify_shards(root, manifest, workers)
    for shard in list_shards(manifest):
        if shard["name"] in verified:
            found, bad = verified[shard["name"]]
            if found.sha256 != shard["sha256"]:
                faults.append(f"{root / shard['name']}: content differs from the manifest (sha256)")
            faults += bad
    return faults


def list_shards(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what the manifest says of each shard."""
    for described in manifest["splits"].values():
        yield from described["shards"]


def verify_shards(root: Path, manifest: Mapping[str, Any], workers: int) -> dict[str, Verified]:
    """Verify every record listed in the tables; a shard without its table is scanned for records."""
    tasks = []
    for split, described in manifest["splits"].items():
        rows = read_table(root, manifest, split)
        for number, shard in enumerate(described["shards"]):
            if (root / shard["name"]).is_file():
                listed = None if rows is None else rows[rows["shard"] == number]
                tasks.append((root, shard["name"], manifest["label_base"], manifest["num_classes"], listed))
    results = tqdm(parallel_map(_verify_shard, tasks, workers), total=len(tasks), unit="shard", disable=None)
    return {shard.name: (shard, faults) for shard, faults in results}


def read_table(root: Path, manifest: Mapping[str, Any], split: str) -> np.ndarray | None:
    """Return the rows of a split, or None if its table does not match the manifest."""
    table = records_path(root, split)
    if not table.is_file() or sha256_of(table) != manifest["splits"][split]["records_sha256"]:
        return None
    return np.load(table)


def _verify_shard(task: tuple[Path, str, int, int, np.ndarray | None]) -> Verified:
    root, name, label_base, num_classes, rows = task
    path = root / name
    if rows is None:
        shard, faults = inspect_shard(root, name)
        shard.rows["label"] -= label_base
        is_bad, more = find_bad_labels(path, shard.rows, label_base, num_classes)
        return Shard(name, shard.sha256, shard.rows[~is_bad]), faults + more
    good, faults = [], []
    for number, row in enumerate(rows):
        try:
            found = inspect_record(read_record(path, row), int(row["offset"]))
            if (*found[1:5], found[5] - label_base, *found[6:]) != row.tolist()[1:]:
                raise BadRecordError("differs from the record table")
            good.append(number)
        except (BadRecordError, BadImageError) as error:
            faults.append(describe_fault(path, number, int(row["offset"]), error))
    return Shard(name, sha256_of(path), rows[good]), faults
