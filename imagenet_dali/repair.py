"""Exclude corrupt records from a prepared data set."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.data.decode import MAX_BAD_SHARE, join_some
from common.errors import UserError
from common.files import folder_lock, sha256_of
from common.object_store import remove_tree
from imagenet_dali.manifest import (
    MANIFEST,
    PARTIAL,
    copy_back,
    data_fingerprint,
    find_faults,
    list_shards,
    read_manifest,
    records_path,
)
from imagenet_dali.verify import find_table, verify_shards
from imagenet_dali.writer import Shard, atomic_file, build_tables, manifest_text, relative_to_root


def repair(root: Path, workers: int, max_refused: float = MAX_BAD_SHARE) -> list[str]:
    """Exclude the records that do not verify; return a line for each, or for a truncated shard.

    Shards are not modified: table and manifest are rewritten, and the manifest keeps the previous fingerprint.
    New tables take effect with the manifest; the next call completes one that was killed. Raises
    `UserError`, before anything is written, for a missing file, for more than `max_refused` of all records including
    earlier repairs, and for a class that would lose all its training images.
    """
    manifest = read_manifest(root)
    with folder_lock(root / PARTIAL):
        try:
            return _repair(root, manifest, workers, max_refused)
        finally:
            remove_tree(root / PARTIAL)


def _repair(root: Path, manifest: dict[str, Any], workers: int, max_refused: float) -> list[str]:
    _settle(root, manifest)
    for split in manifest["splits"]:
        for fault, is_repairable in find_faults(root, manifest, split, list_shards(root, manifest, split)):
            if not is_repairable:
                raise UserError(fault)
    verified = verify_shards(root, manifest, workers)
    splits = {split: [shard for shard, _ in members] for split, members in verified.items()}
    faults = [fault for members in verified.values() for _, found in members for fault in found]
    lost = _check_losses(root, manifest, splits, faults, max_refused)
    described, tables = build_tables(root, splits)
    for path, content in tables.items():
        if not path.is_file() or path.read_bytes() != content:
            with atomic_file(_staged(path)) as file:
                file.write(content)
    repaired = {**manifest, "splits": described}
    if repaired != manifest:
        dropped = relative_to_root(root, faults)
        this = {"fingerprint": data_fingerprint(manifest), "records": lost, "dropped": dropped}
        repaired["repairs"] = [*manifest.get("repairs", ()), this]
        with atomic_file(root / MANIFEST) as file:
            file.write(manifest_text(repaired))
    _settle(root, repaired)
    return faults


def _settle(root: Path, manifest: Mapping[str, Any]) -> None:
    """Move the files that a repair staged for this manifest into place; remove those of one that was never written."""
    for split, described in manifest["splits"].items():
        path = records_path(root, split)
        staged = _staged(path)
        if staged.is_file() and sha256_of(staged) == described["records_sha256"]:
            staged.replace(path)
        staged.unlink(missing_ok=True)


def _staged(path: Path) -> Path:
    return path.with_name(f"{path.name}.repaired")


def _check_losses(
    root: Path,
    manifest: Mapping[str, Any],
    splits: Mapping[str, list[Shard]],
    faults: list[str],
    max_refused: float,
) -> int:
    """Return how many records are lost; raise `UserError` if they are too many."""
    before = sum(described["records"] for described in manifest["splits"].values())
    lost = before - sum(len(shard.rows) for shards in splits.values() for shard in shards)
    lost_earlier = sum(repair["records"] for repair in manifest.get("repairs", ()))
    if lost > 0 and lost + lost_earlier > max_refused * (before + lost_earlier):
        raise UserError(
            f"{root}: {lost + lost_earlier:,} of {before + lost_earlier:,} records are bad, more than "
            f"{100 * max_refused:g}%: {join_some(faults)}; nothing was changed: {copy_back(root)}"
        )
    for split, shards in splits.items():
        left = np.concatenate([shard.rows["label"] for shard in shards])
        table = find_table(root, manifest, split)
        gone = set(table["label"].tolist() if table is not None else ()) - set(left.tolist())
        if not len(left) or (gone and split == "train"):
            what = f"class {min(gone)}" if len(left) else "all classes"
            raise UserError(f"{root}: {what} would lose all its {split} images; nothing was changed: {copy_back(root)}")
    return lost
