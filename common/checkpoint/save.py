"""Checkpoints on disk: whole or not there at all, checked when they are read, the old ones cleared away.

checkpoints/step-00001234/
    model.safetensors       parameters under timm's names
    ema.safetensors         their moving averages, with EMA
    optimizer.safetensors   `<state>/<parameter>`, e.g. `exp_avg/head.weight`
    random.safetensors      `<rank>/<generator>`: states of every rank's random number generators
    trainer.json            where the run stood
    config.json             the run's own
    metrics.jsonl           the run's own, so far
    COMPLETE                written last: SHA-256 of the others, for `sha256sum -c COMPLETE` too
checkpoints/best            symbolic link to the checkpoint of the best evaluation

Nothing in it is code: reading a checkpoint runs none.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from common.checkpoint.content import (
    CONFIG,
    METRICS,
    RANDOM,
    TRAINER,
    TrainerState,
    check_content,
    read_about,
    read_config,
)
from common.checkpoint.model_state import EMA, MODEL, OPTIMIZER, Tensors
from common.errors import UserError
from common.files import read_json, read_text, sha256_of, sync
from common.metrics.curves import MAX_METRICS
from common.model.vit import parameter_count

FILES = (MODEL, OPTIMIZER, RANDOM, TRAINER, CONFIG, METRICS)
MARKER = "COMPLETE"
BEST = "best"
HEADER = 1 << 27  # bytes that a safetensors header may have, and more


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint after ``step`` optimizer steps lies in ``folder``."""
    return folder / f"step-{step:08d}"


def write_checkpoint(path: Path, content: Mapping[str, Tensors | bytes]) -> None:
    """Write the files of ``content`` as the checkpoint folder ``path``, in place of one that is there.

    At any moment ``path`` is whole, as it was before, or not there. On OSError nothing of the new one is left.
    """
    partial, old = (path.with_name(f".{path.name}.{kind}") for kind in ("partial", "old"))
    try:
        put_back_old(path.parent)
        for left in (partial, old):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, value in content.items():
            _write(partial / name, value)
        _write(partial / MARKER, "".join(f"{sha256_of(partial / name)}  {name}\n" for name in content).encode())
        for name in content:  # save_file lets nobody else read
            shutil.copymode(partial / MARKER, partial / name)
        sync(partial)
        if path.exists():
            path.rename(old)
        partial.rename(path)
        sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        put_back_old(path.parent)
        raise


def _write(file: Path, value: Tensors | bytes) -> None:
    if isinstance(value, bytes):
        file.write_bytes(value)
    else:
        save_file(value, file)
    sync(file)


def put_back_old(folder: Path) -> None:
    """Put checkpoints back whose replacement was interrupted."""
    for old in folder.glob(".step-*.old"):
        path = folder / old.name.removeprefix(".").removesuffix(".old")
        if not path.exists():
            old.rename(path)


def find_fault(path: Path) -> str | None:
    """Return what is wrong with the checkpoint folder ``path``, every byte of it checked; None if nothing is.

    No code in it is run: who can write a file with a checksum to match can put anything there.
    """
    try:
        sums = _read_sums(path / MARKER)
        most = MAX_METRICS
        for name in sorted(sums, key=lambda name: name.endswith(".safetensors")):
            if name.endswith(".safetensors"):  # no larger than config.json's model makes them: they may be sparse
                most = HEADER + 24 * parameter_count(**read_config(path, read_about(path))["MODEL"])
            if sha256_of(path / name, most) != sums[name]:
                return f"{name} has changed since it was written"
        check_content(path)
    except UserError as error:
        return str(error).removeprefix(f"{path}/")
    return None


def _read_sums(marker: Path) -> dict[str, str]:
    """Return the checksums in a checkpoint's ``COMPLETE`` by file; raise `UserError` unless it lists what it should."""
    lines = read_text(marker).splitlines()
    found = [re.fullmatch(r"([0-9a-f]{64})  ([\w.]+)", line) for line in lines]
    sums = {match[2]: match[1] for match in found if match}
    if len(sums) != len(lines) or not set(FILES) <= sums.keys() <= {*FILES, EMA}:
        raise UserError(f"{marker}: does not list {', '.join(FILES)} and at most {EMA}, each with its SHA-256")
    return sums


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, the newest first; their content is not checked."""
    return sorted((path.parent for path in folder.glob(f"step-*/{MARKER}") if path.is_file()), reverse=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step in ``folder``, or None; its content is not checked."""
    return next(iter(list_checkpoints(folder)), None)


def mark_best(path: Path) -> None:
    """Let the link ``best`` beside ``path`` point to it."""
    link = path.with_name(f".{BEST}.partial")
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    best = path.with_name(BEST)
    if best.is_dir() and not best.is_symlink():  # copied by a tool that follows links
        best.rename(path.with_name(f".{BEST}.old"))
    link.replace(best)


def clear_old(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints and the best, and what interrupted writing has left."""
    best = (folder / BEST).resolve()
    old = [path for path in list_checkpoints(folder)[keep:] if path.resolve() != best]
    for path in [*old, *folder.glob(".*.partial"), *folder.glob(".*.old")]:
        if path.is_symlink():  # that of an interrupted `mark_best`, or to a checkpoint elsewhere
            path.unlink()
            continue
        # without its marker it no longer counts, should removing it be interrupted
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def load_trainer_state(path: Path) -> dict[str, Any]:
    """Return what ``trainer.json`` of the checkpoint folder ``path`` says."""
    return read_json(path / TRAINER, TrainerState).model_dump()
