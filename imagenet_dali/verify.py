"""Verify every record of a data set: one that preparation made (`check`), or shards made elsewhere (`adopt`)."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from common.errors import UserError
from imagenet_dali.dataset import (
    MANIFEST,
    find_faults,
    index_path,
    read_manifest,
    read_record,
    records_path,
    sha256_of,
)
from imagenet_dali.images import BadImageError, check_jpeg
from imagenet_dali.records import RECORD, BadRecordError, index_text, parse_example, scan, unframe
from imagenet_dali.workers import parallel_map
from imagenet_dali.writer import Shard, write_dataset

SPLITS = ("train", "validation")
Result = TypeVar("Result")


def inspect_record(record: bytes, offset: int) -> tuple[int, ...]:
    """Return the `RECORD` row of one framed record, its label as stored; raise `BadRecordError` or `BadImageError`."""
    image, label = parse_example(unframe(record))
    if not 0 <= label < 2**31:
        raise BadRecordError(f"label {label} is no class number")
    height, width, color_space = check_jpeg(image)
    if color_space not in ("YCbCr", "Gray", "RGB"):
        raise BadImageError(f"{color_space} JPEG, which decoders turn into different colours")
    return 0, offset, len(record), record.find(image), len(image), label, height, width


def check(root: Path, workers: int) -> list[str]:
    """Verify a prepared data set against its manifest, every byte of it; return a line for each fault found."""
    manifest = read_manifest(root)
    faults, tasks = [], []
    for split, described in manifest["splits"].items():
        faults += find_faults(root, manifest, split)
        table = records_path(root, split)
        rows = np.load(table) if table.is_file() and sha256_of(table) == described["records_sha256"] else None
        for number, shard in enumerate(described["shards"]):
            if (root / shard["name"]).is_file():
                expected = None if rows is None else rows[rows["shard"] == number]
                tasks.append((root, split, shard, manifest["label_base"], expected))
    return faults + list(itertools.chain(*_with_progress(_check_shard, tasks, workers)))


def _check_shard(task: tuple[Path, str, dict[str, Any], int, np.ndarray | None]) -> list[str]:
    root, split, described, label_base, rows = task
    path = root / described["name"]
    faults = []
    if sha256_of(path) != described["sha256"]:
        faults.append(f"{path}: content differs from the manifest (sha256)")
    if rows is None:
        return faults
    for number, row in enumerate(rows):
        try:
            found = inspect_record(read_record(path, row), int(row["offset"]))
            if (*found[1:5], found[5] - label_base, *found[6:]) != row.tolist()[1:]:
                raise BadRecordError("differs from the record table")
        except (BadRecordError, BadImageError) as error:
            faults.append(_describe(path, number, int(row["offset"]), error))
    index = index_path(root, split, described["name"])
    if index.is_file() and index.read_bytes() != index_text(rows).encode():
        faults.append(f"{index}: does not list the records of {path}")
    return faults


def adopt(root: Path, labels: Path | None, workers: int) -> list[str]:
    """Make the shards below `root` a data set, or return a line for each bad record and write nothing.

    Shards are the files of ``train/`` and ``validation/``, or ``train-*`` and ``validation-*`` in `root` itself. Their
    labels may count from 0 or 1. `labels` is a file with the class names, one a line; without it the names are the
    numbers from 0. Raises `UserError` when there are no shards or their labels leave open from where they count.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; name the one that holds train/ and validation/")
    if (root / MANIFEST).exists():
        raise UserError(f"{root / MANIFEST}: exists, the data set is prepared already; use --check to verify it")
    names = {split: found for split in SPLITS if (found := _find_shards(root, split))}
    if "train" not in names:
        raise UserError(f"{root}: no shards; they are the files of train/, or files named train-*")
    class_names = labels.read_text().splitlines() if labels else None
    if class_names == []:
        raise UserError(f"{labels}: empty; write one class name a line")
    tasks = [(root, name) for found in names.values() for name in found]
    inspected = {shard.name: (shard, faults) for shard, faults in _with_progress(_inspect_shard, tasks, workers)}
    faults = [fault for _, name in tasks for fault in inspected[name][1]]
    if faults:
        return faults
    splits = {split: [inspected[name][0] for name in found] for split, found in names.items()}
    for split, shards in splits.items():
        if not any(len(shard.rows) for shard in shards):
            raise UserError(f"{root}: the {split} shards hold no records; remove them")
    rows = np.concatenate([shard.rows for shards in splits.values() for shard in shards])
    base = _find_label_base(root, np.unique(rows["label"]), class_names)
    class_names = class_names or [str(label) for label in range(rows["label"].max() + 1 - base)]
    for shard in itertools.chain(*splits.values()):
        shard.rows["label"] -= base
        faults += _find_bad_labels(root / shard.name, shard.rows, base, len(class_names))
    if not faults:
        write_dataset(root, splits, class_names, base, made={"adopted": True})
    return faults


def _find_shards(root: Path, split: str) -> list[str]:
    folder = root / split
    paths = folder.iterdir() if folder.is_dir() else root.glob(f"{split}-*")
    is_shard = (p for p in paths if p.is_file() and p.suffix != ".idx" and not p.name.startswith("."))
    return sorted(path.relative_to(root).as_posix() for path in is_shard)


def _inspect_shard(task: tuple[Path, str]) -> tuple[Shard, list[str]]:
    root, name = task
    path = root / name
    rows, faults, number, end = [], [], 0, 0
    try:
        for offset, record in scan(path):
            try:
                rows.append(inspect_record(record, offset))
            except (BadRecordError, BadImageError) as error:
                faults.append(_describe(path, number, offset, error))
            number, end = number + 1, offset + len(record)
    except BadRecordError as error:
        faults.append(_describe(path, number, end, error))
    return Shard(name, sha256_of(path), np.array(rows, RECORD)), faults


def _describe(path: Path, number: int, offset: int, error: object) -> str:
    return f"{path}: record {number} at byte {offset}: {error}"


def _find_label_base(root: Path, present: np.ndarray, class_names: list[str] | None) -> int:
    """Return 0 or 1, the label of the first class; `present` are the different labels, sorted."""
    low, high = int(present[0]), int(present[-1])
    if class_names:
        if 0 in present or len(class_names) in present:
            return 0 if 0 in present else 1
        raise UserError(
            f"{root}: labels {low} to {high} fit {len(class_names)} names counted from 0 and from 1; complete them"
        )
    if low not in (0, 1) or len(present) != high - low + 1:
        gap = next(label for label in itertools.count(min(low, 1)) if label not in present)
        raise UserError(f"{root}: labels run from {low} to {high} without {gap}; name every class with --labels FILE")
    return low


def _find_bad_labels(path: Path, rows: np.ndarray, base: int, num_classes: int) -> list[str]:
    bad = np.flatnonzero((rows["label"] < 0) | (rows["label"] >= num_classes))
    allowed = f"out of range for {num_classes} classes from {base}"
    return [_describe(path, n, rows["offset"][n], f"label {rows['label'][n] + base}, {allowed}") for n in bad]


def _with_progress(function: Callable[..., Result], tasks: list, workers: int) -> Iterable[Result]:
    return tqdm(parallel_map(function, tasks, workers), total=len(tasks), unit="shard", disable=None)
