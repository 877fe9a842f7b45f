"""torch.compile of a model or its blocks, with or without CUDA graphs."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.colossal.upstream import ParallelMode, gpc
from common.errors import UserError, is_first_process

MODEL, GRAPHS = "model", "graphs"  # values of the config's COMPILE, besides True, False and None
GRAPHS_PER_BLOCK = 4  # training and evaluation, with and without gradients


def check_compile(asked: bool | str | None, tensor_size: int) -> None:
    """Raise `UserError` for tensor-parallel blocks: their matrix products are Colossal-AI's autograd functions."""
    if asked and tensor_size > 1:
        raise UserError(f"COMPILE={asked!r} does not support tensor parallelism: omit COMPILE or the tensor mode")


def should_compile(asked: bool | str | None, device_type: str) -> bool:
    """Return whether to compile a model, from the config's ``COMPILE``; default: on GPUs without tensor parallelism.

    Raises `UserError` as `check_compile` does. Warns if no compiler is available.
    """
    tensor_size = gpc.get_world_size(ParallelMode.TENSOR)
    check_compile(asked, tensor_size)
    is_cut = tensor_size > 1
    if asked is False or (asked is None and (is_cut or device_type != "cuda")):
        return False
    missing = _missing(device_type)
    if missing and is_first_process():
        print(f"warning: the model is not compiled: missing {missing}", file=sys.stderr, flush=True)
    return not missing


def _missing(device_type: str) -> str:
    """Return what is missing for inductor (C++) or Triton (C, on GPUs) to build its code; "" if nothing."""
    variable, language, usual = ("CC", "C", ("gcc", "clang")) if device_type == "cuda" else ("CXX", "C++", ("g++",))
    compilers = [os.environ[variable]] if variable in os.environ else usual
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        return "package triton"
    if not any(map(shutil.which, compilers)):
        return f"{language} compiler {' or '.join(compilers)}; install it, or set {variable}"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.exists() else f"{header}; install Python's development files"


def compile_model(model: nn.Module, how: bool | str | None, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile ``model`` in place; names stay the same.

    ``how``: "model" as a whole, "graphs" as a whole and replayed as CUDA graphs on GPUs, anything else its ``blocks``
    one by one. Identical blocks are compiled once, and with several ranks gradients are reduced while the backward pass
    continues; a whole model has all its gradients at the end.
    """
    # with AMP_TYPE.NAIVE or drop_path every block is compiled separately; beyond the limit dynamo stops compiling
    blocks = list(model.get_submodule("blocks").children())
    limit = GRAPHS_PER_BLOCK * len(blocks)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    # do not split graphs at DDP's bucket boundaries: blocks are small enough to overlap with communication
    torch._dynamo.config.optimize_ddp = False
    for part in [model] if how in (MODEL, GRAPHS) else blocks:
        part.compile(backend=backend, mode="reduce-overhead" if how == GRAPHS else None)


def keep_gradients(parameters: Iterable[Tensor]) -> None:
    """Allocate the gradients, into which the backward pass adds.

    Otherwise they would be memory of a CUDA graph, which its next replay overwrites in gradient accumulation.
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
