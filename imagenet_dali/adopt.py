"""Turn existing TFRecord shards into a prepared data set."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.errors import UNPRINTABLE, UserError
from imagenet_dali.manifest import MANIFEST, read_labels
from imagenet_dali.verify import ANY_LABEL, describe_fault, inspect_shards
from imagenet_dali.writer import Shard, relative_to_root, write_dataset

SPLITS = ("train", "validation")


def adopt(root: Path, labels: Path | None, workers: int, max_refused: float | None = None) -> list[str]:
    """Index and describe the shards below `root`, or return a line for each bad record and write nothing.

    Shards are the files of ``train/`` and ``validation/``, or ``train-*`` and ``validation-*`` in `root` itself. Their
    labels may start at 0 or 1. `labels` is a file with one class name per line; by default classes are named by their
    number. With `max_refused` bad records are excluded, if they and what follows a record of unknown length are at most
    that share of all bytes. Raises `UserError` if there are no shards, if the first label is ambiguous, and if too
    much is bad.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; name the one that holds train/ and validation/")
    if (root / MANIFEST).exists():
        raise UserError(f"{root / MANIFEST}: exists, the data set is prepared already; use --check to verify it")
    names = {split: found for split in SPLITS if (found := _find_shards(root, split))}
    if "train" not in names:
        raise UserError(f"{root}: no shards; they are the files of train/, or files named train-*")
    class_names = read_labels(labels) if labels else None
    if class_names == []:
        raise UserError(f"{labels}: empty; write one class name a line")
    found = inspect_shards([(root, name, None, ANY_LABEL) for name in itertools.chain(*names.values())], workers)
    splits = {split: [found[name][0] for name in shards] for split, shards in names.items()}
    faults = [fault for shards in names.values() for name in shards for fault in found[name][1]]
    if faults and max_refused is None:
        return faults
    _check_losses(root, splits, max_refused or 0.0)
    present = np.unique(np.concatenate([shard.rows["label"] for shards in splits.values() for shard in shards]))
    base = _find_label_base(root, present, class_names)
    class_names = class_names or [str(label) for label in range(present[-1] + 1 - base)]
    for shards in splits.values():
        for number, shard in enumerate(shards):
            shard.rows["label"] -= base
            is_bad = shard.rows["label"] >= len(class_names)
            for row in np.flatnonzero(is_bad).tolist():
                label, offset = shard.rows["label"][row] + base, shard.rows["offset"][row]
                reason = f"label {label}, out of range for {len(class_names)} classes from {base}"
                faults.append(describe_fault(root / shard.name, row, offset, reason))
            shards[number] = replace(shard, rows=shard.rows[~is_bad])
    if faults and max_refused is None:
        return faults
    _check_losses(root, splits, max_refused or 0.0)
    write_dataset(root, splits, class_names, base, made={"adopted": True, "dropped": relative_to_root(root, faults)})
    return faults


def _check_losses(root: Path, splits: dict[str, list[Shard]], max_refused: float) -> None:
    shards = list(itertools.chain(*splits.values()))
    total = sum((root / shard.name).stat().st_size for shard in shards)
    lost = total - sum(int(shard.rows["size"].sum()) for shard in shards)
    if lost > max_refused * total:
        raise UserError(
            f"{root}: {lost:,} of {total:,} bytes are bad, more than {100 * max_refused:g}%; repair the files"
        )
    for split, members in splits.items():
        if not any(len(shard.rows) for shard in members):
            raise UserError(f"{root}: the {split} shards hold no records; remove them")


def _find_shards(root: Path, split: str) -> list[str]:
    folder = root / split
    paths = folder.iterdir() if folder.is_dir() else root.glob(f"{split}-*")
    is_shard = (p for p in paths if p.is_file() and p.suffix != ".idx" and not p.name.startswith("."))
    names = sorted(path.relative_to(root).as_posix() for path in is_shard)
    if odd := next(filter(UNPRINTABLE.search, names), None):
        raise UserError(f"{root}: {odd}: the manifest could not hold this name: rename the shard")
    return names


def _find_label_base(root: Path, present: np.ndarray, class_names: list[str] | None) -> int:
    """Return 0 or 1, the label of the first class; `present` are the distinct labels, sorted."""
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
