"""Verify a prepared data set; turn existing TFRecord shards into one."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.errors import UserError
from common.files import sha256_of
from imagenet_dali.dataset import MANIFEST, ShardEntry, Split, find_faults, open_split, read_labels, read_manifest
from imagenet_dali.images import BadImageError, check_jpeg
from imagenet_dali.records import RECORD, BadRecordError, parse_example, scan, unframe
from imagenet_dali.writer import ShardRows, parallel_map, write_dataset

SPLITS = ("train", "validation")
ANY_LABEL = range(2**31)


def check(root: Path, workers: int) -> list[str]:
    """Compare every byte of a prepared data set with its manifest; return a line for each fault of a shard."""
    faults = []
    for name, entry in read_manifest(root).splits.items():
        if missing := list(find_faults(root, entry.shards)):
            faults += missing
            continue
        split, ends = open_split(root, name), np.cumsum([shard.records for shard in entry.shards]).tolist()
        tasks = list(zip(entry.shards, [0, *ends], ends, strict=False))
        with ThreadPoolExecutor(workers) as pool:
            found = pool.map(lambda task, split=split: _check_shard(split, *task), tasks)
            faults += itertools.chain(*tqdm(found, total=len(tasks), unit="shard", disable=None))
    return faults


def _check_shard(split: Split, entry: ShardEntry, first: int, end: int) -> list[str]:
    path = Path(split.root) / entry.name
    if sha256_of(path) == entry.sha256:
        return []
    bad = [str(record) for record in split.read_span(first, end) if isinstance(record, UserError)]
    return bad or [f"{path}: content differs from the manifest (sha256)"]


def adopt(root: Path, labels: Path | None, workers: int) -> list[str]:
    """Index and describe the shards below `root`, or return a line for each bad record and write nothing.

    Shards are the files of ``train/`` and ``validation/``, or ``train-*`` and ``validation-*`` in `root` itself. Their
    labels may start at 0 or 1. `labels` is a file with one class name per line; by default classes are named by their
    number. Raises `UserError` if there are no shards, and if the first label is ambiguous.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; name the one that holds train/ and validation/")
    if (root / MANIFEST).exists():
        raise UserError(f"{root / MANIFEST}: exists, the data set is prepared already; use --check to verify it")
    names = {split: found for split in SPLITS if (found := _find_shards(root, split))}
    if "train" not in names:
        raise UserError(f"{root}: no shards; they are the files of train/, or files named train-*")
    class_names = read_labels(labels) if labels else None
    tasks = [(root, name) for name in itertools.chain(*names.values())]
    results = tqdm(parallel_map(_inspect_shard, tasks, workers), total=len(tasks), unit="shard", disable=None)
    found = {shard.name: (shard, faults) for shard, faults in results}
    if faults := [fault for name in found for fault in found[name][1]]:
        return sorted(faults)
    splits = {split: [found[name][0] for name in shards] for split, shards in names.items()}
    for split, shards in splits.items():
        if not any(len(shard.rows) for shard in shards):
            raise UserError(f"{root}: the {split} shards hold no records; remove them")
    present = np.unique(np.concatenate([shard.rows["label"] for shard, _ in found.values()]))
    base = _find_label_base(root, present.tolist(), class_names)
    class_names = class_names or [str(label) for label in range(int(present[-1]) + 1 - base)]
    if present[-1] - base >= len(class_names):
        raise UserError(f"{root}: label {present[-1]}, out of range for {len(class_names)} classes from {base}")
    for shard, _ in found.values():
        shard.rows["label"] -= base
    write_dataset(root, splits, class_names, base, made={"adopted": True})
    return []


def _find_shards(root: Path, split: str) -> list[str]:
    folder = root / split
    paths = folder.iterdir() if folder.is_dir() else root.glob(f"{split}-*")
    is_shard = (p for p in paths if p.is_file() and p.suffix != ".idx" and not p.name.startswith("."))
    return sorted(path.relative_to(root).as_posix() for path in is_shard)


def _inspect_shard(task: tuple[Path, str]) -> tuple[ShardRows, list[str]]:
    """Return the rows of a shard's records, and a line for each that must not reach training."""
    root, name = task
    rows, faults, number, end = [], [], 0, 0
    try:
        for number, (offset, record) in enumerate(scan(root / name)):
            end = offset + len(record)
            try:
                rows.append(_inspect_record(record, offset))
            except (BadRecordError, BadImageError) as error:
                faults.append(f"{root / name}: record {number} at byte {offset}: {error}")
    except BadRecordError as error:
        faults.append(f"{root / name}: after record {number}, at byte {end}: {error}")
    return ShardRows(name, sha256_of(root / name), np.array(rows, RECORD)), faults


def _inspect_record(record: bytes, offset: int) -> tuple[int, ...]:
    """Return the `RECORD` row of one framed record, its label as stored."""
    image, label = parse_example(unframe(record))
    if label not in ANY_LABEL:
        raise BadRecordError(f"label {label} is no class number")
    height, width, color_space = check_jpeg(image)
    if color_space not in ("YCbCr", "Gray", "RGB"):
        raise BadImageError(f"{color_space} JPEG, which decoders turn into different colours")
    return 0, offset, len(record), record.find(image), len(image), label, height, width


def _find_label_base(root: Path, present: list[int], class_names: list[str] | None) -> int:
    """Return 0 or 1, the label of the first class; `present` are the distinct labels, sorted."""
    low, high = present[0], present[-1]
    if class_names:
        if low == 0 or len(class_names) in present:
            return min(low, 1)
        raise UserError(
            f"{root}: labels {low} to {high} fit {len(class_names)} names counted from 0 and from 1; complete them"
        )
    if low > 1 or len(present) != high - low + 1:
        raise UserError(f"{root}: labels run from {low} to {high} with gaps; name every class with --labels FILE")
    return low
