"""Write checkpoints: whole or not there at all, the old ones cleared away."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file

from common.checkpoint.content import BEST, MARKER
from common.checkpoint.state import Tensors
from common.files import sha256_of, sync


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
