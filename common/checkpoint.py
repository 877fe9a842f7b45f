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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from common.errors import UserError

MARKER = "COMPLETE"


def save_checkpoint(folder: Path, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> Path:
    """Write ``folder/step-<step>`` under a temporary name, make it durable, and rename it; ``state`` holds ``step``."""
    path = folder / f"step-{state['step']:08d}"
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(_on_cpu(model.state_dict()), partial / "model.safetensors")
    tensors, options = _flatten(model, optimizer)
    save_file(_on_cpu(tensors), partial / "optimizer.safetensors")
    (partial / "trainer.json").write_text(json.dumps({**state, "optimizer": options}, indent=2) + "\n")
    for file in partial.iterdir():
        _sync(file)
    (partial / MARKER).touch()
    _sync(partial)
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
    _sync(folder)
    return path


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step in ``folder``, or None."""
    return max((path.parent for path in folder.glob(f"step-*/{MARKER}")), default=None)


def load_model_state(path: Path) -> dict[str, Tensor]:
    """Return the parameters in the checkpoint folder ``path``; they load strictly into timm's model of that shape."""
    if not (path / MARKER).exists():
        raise UserError(f"{path} is not a complete checkpoint: it has no {MARKER}")
    return load_file(path / "model.safetensors")


def _flatten(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the optimiser's state by parameter name, and its groups' options with the names of their parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {
        f"{key}/{names[parameter]}": torch.as_tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if value is not None
    }
    options = [group | {"params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return tensors, options


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
