"""The full state of a model and its optimizer under timm's names, and the folders that hold it."""

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from common.checkpoint.content import (
    BEST,
    BEST_FILE,
    EMA,
    MARKER,
    MODEL,
    OPTIMIZER,
    check_shapes,
)
from common.engine.tensor_parallel.sharding import (
    full_model_state,
    full_shape,
    gather_full,
    load_full_model_state,
    local_shard,
    local_state,
    named_shards,
)
from common.engine.upstream import gpc
from common.errors import UserError
from common.files import read_text, sha256_of, sync
from common.metrics.loggers import warn

Tensors = dict[str, Tensor]


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
        put_back_old(path.parent)
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
        if path.exists():
            path.rename(old)
        partial.rename(path)
        sync(path.parent)
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
        if not path.exists():
            old.rename(path)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, the newest first, with any content."""
    markers = folder.glob(f"step-*/{MARKER}")
    return sorted((marker.parent for marker in markers if marker.is_file()), reverse=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step in ``folder``, or None."""
    return next(iter(list_checkpoints(folder)), None)


def best_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint in ``folder`` that ``best.txt`` names, or None.

    A run of an earlier version has the link ``best`` alone; in a copy that follows links it is a
    folder.
    """
    file = folder / BEST_FILE
    link = folder / BEST
    if not (file.exists() or link.is_symlink()):
        return _original(link)
    name = read_text(file).strip() if file.exists() else link.readlink().name
    return next((path for path in list_checkpoints(folder) if path.name == name), None)


def _original(copy: Path) -> Path | None:
    """Return the checkpoint beside ``copy`` with the same checksums, or else ``copy``.

    None where ``copy`` is no checkpoint.
    """
    marker = copy / MARKER
    if not marker.is_file():
        return None
    beside = list_checkpoints(copy.parent)
    return next((p for p in beside if read_text(p / MARKER) == read_text(marker)), copy)


def mark_best(path: Path) -> None:
    """Name ``path`` in ``best.txt`` beside it, and let the link ``best`` point to it.

    A folder in the place of the link is removed if it is a copy of another checkpoint, else
    renamed. On a file system without links only the file is written.
    """
    folder = path.parent
    link = folder / BEST
    partial = folder / f".{BEST_FILE}.partial"
    partial_link = folder / f".{BEST}.partial"
    partial.write_text(f"{path.name}\n")
    sync(partial)
    partial.replace(folder / BEST_FILE)
    if link.is_dir() and not link.is_symlink():
        if _original(link) in (None, link):
            kept = tempfile.mkdtemp(prefix=f"{BEST}-", dir=folder)
            link.rename(kept)
            warn(f"{link} is a folder without another copy: it is now {kept}")
        else:
            shutil.rmtree(link)
    try:
        partial_link.unlink(missing_ok=True)
        partial_link.symlink_to(path.name)
        partial_link.replace(link)
    except OSError:  # no links here: none is better than one to an earlier checkpoint
        link.unlink(missing_ok=True)


def clear_old(newest: Path, keep: int) -> None:
    """Remove all but the best and ``keep`` checkpoints up to ``newest``, and unfinished files.

    Later ones were damaged when the run was resumed from an earlier one.
    """
    folder = newest.parent
    best = best_checkpoint(folder)
    earlier = [path for path in list_checkpoints(folder) if path.name <= newest.name]
    old = [path for path in earlier[keep:] if path != best]
    for path in [*old, *folder.glob(".*.partial"), *folder.glob(".*.old")]:
        # those of an interrupted `mark_best`, or a link to a checkpoint elsewhere
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
    buffers: dict[str, Tensors],
) -> dict[str, Tensors]:
    """Copy the parameters, their averages and the optimizer's state to the CPU, by their file.

    The optimizer's are named ``<state>/<parameter>``, e.g. ``exp_avg/head.weight``. Every rank must
    call it; only rank 0 copies. The next call with the same ``buffers`` overwrites the copies,
    instead of allocating and pinning memory.
    """
    files = {
        MODEL: full_model_state(model),
        OPTIMIZER: _gather_moments(named_shards(model), optimizer),
    }
    if averages is not None:
        files[EMA] = (
            (name, gather_full(shard, averages.get(name)))
            for name, shard in local_state(model).items()
        )
    copies = {file: _copy(tensors, buffers.setdefault(file, {})) for file, tensors in files.items()}
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return copies


def _gather_moments(
    parameters: Mapping[str, nn.Parameter], optimizer: Optimizer
) -> Iterator[tuple[str, Tensor | None]]:
    """Gather the optimizer's full states one by one, as (``<state>/<parameter>``, tensor)."""
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                # others, as a number of steps or the means of rows, are the same on all ranks
                is_sharded = value.shape == parameter.shape
                yield f"{key}/{name}", gather_full(parameter, value) if is_sharded else value


def _copy(tensors: Iterable[tuple[str, Tensor | None]], buffers: Tensors) -> Tensors:
    """Copy the tensors into ``buffers`` on rank 0, each before the next one is gathered.

    The other ranks only take part in gathering them.
    """
    is_first = gpc.get_global_rank() == 0
    copies = {}
    for name, tensor in tensors:
        if tensor is not None and is_first:
            if name not in buffers:
                buffers[name] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
            copies[name] = buffers[name].copy_(tensor.detach(), non_blocking=True)
    return copies


def load_full_state_dict(
    path: Path, model: nn.Module, optimizer: Optimizer, averages: Mapping[str, Tensor] | None
) -> None:
    """Load the checkpoint folder ``path`` into a model and its optimizer, in any parallel mode.

    ``optimizer`` keeps its own options. Where the checkpoint has no ``averages``, they begin at its
    weights. Raises UserError for the checkpoint of another architecture.
    """
    weights = load_file(path / MODEL)
    check_architecture(path, weights, model)
    load_full_model_state(model, weights)
    _load_moments(path, load_file(path / OPTIMIZER), model, optimizer)
    if averages is not None:
        full = load_file(path / EMA) if (path / EMA).exists() else weights
        shards = local_state(model)
        for name, average in averages.items():
            average.copy_(local_shard(shards[name], full[name]))


def check_architecture(path: Path, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise `UserError` unless ``weights``, of ``path``, are full and finite, as of ``model``."""
    saved = {name: list(tensor.shape) for name, tensor in weights.items()}
    wanted = {name: list(full_shape(shard)) for name, shard in local_state(model).items()}
    check_shapes(path, saved, wanted)
    for name, tensor in weights.items():
        if not tensor.is_meta and not tensor.isfinite().all():
            raise UserError(
                f"{path}: {name} holds numbers that are not finite: start from other weights"
            )


def _load_moments(
    path: Path, moments: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer
) -> None:
    """Give every parameter its shard of the full ``moments``, named ``<state>/<parameter>``."""
    parameters = named_shards(model)
    state = defaultdict(dict)
    for entry, full in moments.items():
        key, _, name = entry.partition("/")
        if name not in parameters:
            raise UserError(
                f"{path / OPTIMIZER} does not belong to its model: it has {entry}; use "
                "another checkpoint"
            )
        parameter = parameters[name]
        is_moment = full.shape == full_shape(parameter)
        state[parameter][key] = local_shard(parameter, full) if is_moment else full
    # torch numbers the parameters; its loading brings each state to the optimizer's device and type
    ordered: list[Any] = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    numbered = {
        number: state[parameter] for number, parameter in enumerate(ordered) if parameter in state
    }
    optimizer.load_state_dict(
        {"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]}
    )
