"""The full state of a model and its optimizer under timm's names, and the folders that hold it."""

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from common.checkpoint.content import (
    BEST,
    BEST_FILE,
    MARKER,
    MODEL,
    OPTIMIZER,
    RAW,
    Tensors,
    read_tensors,
    weight_files,
)
from common.engine.tensor_parallel.sharding import (
    full_model_state,
    full_optimizer_state,
    gather_full,
    load_full_model_state,
    load_full_optimizer_state,
    local_shard,
    local_state,
)
from common.engine.upstream import gpc
from common.errors import UserError
from common.files import read_text, sha256_of, sync
from common.metrics.loggers import warn
from common.metrics.metrics_file import Metrics
from common.model.fit import check_weights


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint after ``step`` optimizer steps lies in ``folder``."""
    return folder / f"step-{step:08d}"


def write_checkpoint(path: Path, content: Mapping[str, Tensors | bytes]) -> None:
    """Write the files of ``content`` as the checkpoint folder ``path``, or replace it.

    At any moment ``path`` is whole, as it was before, or not there. On OSError nothing of the new
    one is left.
    """
    partial = path.with_name(f".{path.name}.partial")
    old = path.with_name(f".{path.name}.old")
    try:
        for left in (partial, old):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, value in content.items():
            _write_file(partial / name, value)
        sums = [f"{sha256_of(partial / name)}  {name}\n" for name in content]
        _write_file(partial / MARKER, "".join(sums).encode())
        # save_file lets nobody else read
        for name in content:
            shutil.copymode(partial / MARKER, partial / name)
        sync(partial)
        # No rename replaces a folder that has files. After a crash between the two, the next start
        # puts `.old` back.
        if path.exists():
            path.rename(old)
        partial.rename(path)
        sync(path.parent)  # A power failure might undo the renames.
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        put_back_old(path.parent)
        raise


def _write_file(file: Path, value: Tensors | bytes) -> None:
    """Write ``file`` to the disk."""
    if isinstance(value, bytes):
        file.write_bytes(value)
    else:
        save_file(value, file)
    sync(file)


def put_back_old(folder: Path) -> None:
    """Put checkpoints back whose replacement was interrupted."""
    for old in folder.glob(".step-*.old"):
        path = folder / old.name.removeprefix(".").removesuffix(".old")
        # Where it does, the new one is in its place, and `clear_old` removes the old one.
        if not path.exists():
            old.rename(path)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, the newest first, with any content."""
    # Steps have eight digits each, so that the order of names is that of steps.
    return sorted((marker.parent for marker in folder.glob(f"step-*/{MARKER}")), reverse=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step in ``folder``, or None."""
    return next(iter(list_checkpoints(folder)), None)


def best_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint in ``folder`` that ``best.txt`` names, or None.

    A run of an earlier version has the link ``best`` alone; in a copy that follows links it is a
    folder.
    """
    file = folder / BEST_FILE
    best = (folder / BEST).resolve()
    if file.exists():
        # The name alone: the file of a stranger may say ../../elsewhere.
        best = folder / Path(read_text(file).strip()).name
    return best if (best / MARKER).is_file() else None


def find_best(run: Path, evaluations: Sequence[Metrics]) -> Metrics | None:
    """Return the evaluation of a run's checkpoints/best; None where it is not known."""
    folder = run / "checkpoints"
    marked = best_checkpoint(folder)  # a branch has its own, not that of its origin
    for record in evaluations:
        if checkpoint_path(folder, record["step"]) == marked:
            return record
    return None


def mark_best(path: Path) -> None:
    """Name ``path`` in ``best.txt`` beside it, and let the link ``best`` point to it.

    A folder in the place of the link, as `cp -rL` leaves it, may be the only copy of its
    checkpoint: it is renamed. On a file system without links only the file is written.
    """
    folder = path.parent
    link = folder / BEST
    partial = folder / f".{BEST_FILE}.partial"
    # The file goes first: tools read it, on any file system.
    partial.write_text(f"{path.name}\n")
    sync(partial)
    partial.replace(folder / BEST_FILE)
    if link.is_dir() and not link.is_symlink():
        # A rename replaces an empty folder. This one has a name that is not in use.
        kept = tempfile.mkdtemp(prefix=f"{BEST}-", dir=folder)
        link.rename(kept)
        warn(f"{link} is a folder in place of a link: it is now {kept}")
    link.unlink(missing_ok=True)
    # Without links here, none is better than one to an earlier checkpoint.
    with suppress(OSError):
        link.symlink_to(path.name)  # relative: it holds when the run's folder is moved


def clear_old(newest: Path, keep: int, stable_end: int = 0) -> None:
    """Remove all but ``keep`` checkpoints up to ``newest``, the best, and that of ``stable_end``.

    Unfinished files are removed too.

    Checkpoints after ``newest`` stay: this run was resumed from an earlier one because they are
    damaged.
    """
    folder = newest.parent
    stay = best_checkpoint(folder), checkpoint_path(folder, stable_end)
    earlier = [path for path in list_checkpoints(folder) if path.name <= newest.name]
    old = [path for path in earlier[keep:] if path not in stay]
    for path in [*old, *folder.glob(".*.partial"), *folder.glob(".*.old")]:
        # best.txt's of an interrupted `mark_best`, or a link to a checkpoint elsewhere
        if path.is_symlink() or path.is_file():
            path.unlink()
            continue
        # without its marker it no longer counts, should removing it be interrupted
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def full_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    averages: Mapping[str, Tensor] | None,
) -> dict[str, Tensors]:
    """Copy the parameters, their averages and the optimizer's state to the CPU, by their file.

    The optimizer's are named ``<state>/<parameter>``, e.g. ``exp_avg/head.weight``. Every rank must
    call it; only rank 0 copies.
    """
    files = {
        MODEL: full_model_state(model),
        OPTIMIZER: full_optimizer_state(model, optimizer),
    }
    if averages is not None:
        files[RAW] = files[MODEL]
        # A generator gathers each when it is copied, so that one full tensor is held at a time.
        files[MODEL] = (
            (name, gather_full(shard, averages.get(name)))
            for name, shard in local_state(model).items()
        )
    copies = {file: _copy(tensors) for file, tensors in files.items()}
    # Copies to pinned memory return at once. Training changes the tensors after this returns.
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return copies


def _copy(tensors: Iterable[tuple[str, Tensor | None]]) -> Tensors:
    """Copy the tensors on rank 0, each before the next one is gathered.

    The other ranks only take part in gathering them.
    """
    is_first = gpc.get_global_rank() == 0
    copies = {}
    for name, tensor in tensors:
        if tensor is not None and is_first:
            # PyTorch keeps pinned memory: the next checkpoint's copies get that of the last.
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copies[name] = copy.copy_(tensor.detach(), non_blocking=True)
    return copies


def load_full_state_dict(
    path: Path, model: nn.Module, optimizer: Optimizer, averages: Mapping[str, Tensor] | None
) -> None:
    """Load the checkpoint folder ``path`` into a model and its optimizer, in any parallel mode.

    ``optimizer`` keeps its own options. Where the checkpoint has no ``averages``, they begin at its
    weights. Raises UserError for the checkpoint of another architecture.
    """
    files = weight_files(path)
    weights = read_tensors(path / files.trained)
    check_weights(path / files.trained, weights, model)
    load_full_model_state(model, weights)
    state = read_tensors(path / OPTIMIZER)
    unknown = [entry for entry in state if entry.partition("/")[2] not in weights]
    if unknown:
        raise UserError(
            f"{path / OPTIMIZER} does not belong to its model: it has {unknown[0]}; use another "
            "checkpoint"
        )
    load_full_optimizer_state(model, optimizer, state)
    if averages is not None:
        full = read_tensors(path / files.evaluated)
        check_weights(path / files.evaluated, full, model)
        shards = local_state(model)
        for name, average in averages.items():
            # In place: `EmaHook` holds these tensors.
            average.copy_(local_shard(shards[name], full[name]))
