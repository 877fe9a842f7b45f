"""Checkpoints: the whole model under timm's names, the optimiser's state, and where the run stood.

checkpoints/step-00001234/
    model.safetensors       parameters
    optimizer.safetensors   `<state>/<parameter>`, e.g. `exp_avg/head.weight`
    trainer.json            step, epoch, and the optimiser's options
    COMPLETE                written last: a folder without it is no checkpoint
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from common.colossal import canonical_state, cut_piece, gather_whole, load_canonical_state, whole_shape
from common.errors import UserError

MARKER = "COMPLETE"
SHOWN = 10  # parameters that an error lists


def save_checkpoint(folder: Path, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> Path:
    """Write the checkpoint ``folder/step-<step>``, the same whatever the parallel mode; ``state`` holds ``step``.

    Every rank must call it, because a sharded model is gathered; rank 0 writes. It writes under a temporary name, makes
    it durable, and renames it.
    """
    path = folder / f"step-{state['step']:08d}"
    weights = canonical_state(model)
    moments, options = _flatten(model, optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _write(path, weights, moments, {**state, "optimizer": options})
    return path


def _write(path: Path, weights: dict[str, Tensor], moments: dict[str, Tensor], state: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(_contiguous(weights), partial / "model.safetensors")
    save_file(_contiguous(moments), partial / "optimizer.safetensors")
    (partial / "trainer.json").write_text(json.dumps(state, indent=2) + "\n")
    for file in partial.iterdir():
        _sync(file)
    (partial / MARKER).touch()
    _sync(partial)
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
    _sync(path.parent)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step in ``folder``, or None."""
    return max((path.parent for path in folder.glob(f"step-*/{MARKER}")), default=None)


def load_model_state(path: Path) -> dict[str, Tensor]:
    """Return the parameters in the checkpoint folder ``path``; they load strictly into timm's model of that shape."""
    if not (path / MARKER).exists():
        raise UserError(f"{path} is not a complete checkpoint: it has no {MARKER}")
    return load_file(path / "model.safetensors")


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Load the checkpoint folder ``path``, saved in whatever parallel mode, into a model that is sharded or not.

    Returns the ``state`` it was saved with, and the optimiser's options then, under ``optimizer``; ``optimizer`` keeps
    its own, the learning rate among them. Raises UserError for the checkpoint of another architecture.
    """
    weights = load_model_state(path)
    _check_architecture(path, weights, model)
    load_canonical_state(model, weights)
    _load_moments(load_file(path / "optimizer.safetensors"), model, optimizer)
    return json.loads((path / "trainer.json").read_text())


def _check_architecture(path: Path, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    saved = {name: list(tensor.shape) for name, tensor in weights.items()}
    wanted = {name: list(whole_shape(parameter)) for name, parameter in model.named_parameters()}
    names = [name for name in wanted | saved if saved.get(name) != wanted.get(name)]
    if names:
        shown = [f"{name} {saved.get(name, 'missing')} (model: {wanted.get(name, 'none')})" for name in names[:SHOWN]]
        more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise UserError(
            f"{path} is of another architecture: {', '.join(shown)}{more}; load it with the MODEL it was trained with"
        )


def _load_moments(moments: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    """Give every parameter its pieces of ``moments``, whose names are ``<state>/<parameter>``."""
    parameters = dict(model.named_parameters())
    state: dict[Tensor, dict[str, Tensor]] = {}
    for path, whole in moments.items():
        key, _, name = path.partition("/")
        parameter = parameters[name]
        is_moment = whole.shape == whole_shape(parameter)
        state.setdefault(parameter, {})[key] = cut_piece(parameter, whole) if is_moment else whole
    # torch's own loading brings every state to the device and the type that the optimiser keeps it in
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbered = {number: state[parameter] for number, parameter in enumerate(ordered) if parameter in state}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})


def _flatten(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the optimiser's whole state by parameter name, and its groups' options with their parameters' names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    moments = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value is None:
                continue
            value = torch.as_tensor(value)
            whole = gather_whole(parameter, value) if value.shape == parameter.shape else value
            if whole is not None:
                moments[f"{key}/{names[parameter]}"] = whole.cpu()
    options = [group | {"params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return moments, options


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
