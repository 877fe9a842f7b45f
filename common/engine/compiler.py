"""torch.compile: whether and what to compile, and what to do where it fails."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.engine.upstream import ParallelMode, gpc
from common.errors import UserError
from common.launchers import is_first_process
from common.text import first_line

GRAPHS_PER_BLOCK = 4  # training and evaluation, with and without gradients


def check_compile(config: Mapping[str, Any]) -> None:
    """Raise `UserError` for a tensor-parallel model that is to be compiled."""
    asked = config.get("COMPILE")
    # The matrix products of tensor parallelism are Colossal-AI's autograd functions.
    if asked and config["parallel"]["tensor"]["size"] > 1:
        raise UserError(
            f"COMPILE={asked!r} does not support tensor parallelism: omit COMPILE or the tensor "
            "mode"
        )


def should_compile(asked: bool | str | None, device_type: str) -> bool:
    """Return whether to compile a model, from the config's ``COMPILE``.

    Default: on GPUs without tensor parallelism. Raises `UserError` as `check_compile` does. Warns
    if no compiler is available.
    """
    check_compile(gpc.config)
    if asked is None:
        asked = device_type == "cuda" and gpc.get_world_size(ParallelMode.TENSOR) == 1
    if not asked:
        return False
    missing = _missing(device_type)
    if missing and is_first_process():
        print(f"warning: the model is not compiled: missing {missing}", file=sys.stderr, flush=True)
    return not missing


def _missing(device_type: str) -> str:
    """Return what inductor (C++) or Triton (C, on GPUs) lacks to build its code, or ""."""
    variable = "CC" if device_type == "cuda" else "CXX"
    language = "C" if device_type == "cuda" else "C++"
    compilers = ["gcc", "clang"] if device_type == "cuda" else ["g++"]
    if variable in os.environ:
        compilers = [os.environ[variable]]
    if not any(map(shutil.which, compilers)):
        return f"{language} compiler {' or '.join(compilers)}; install it, or set {variable}"
    # The generated code includes it.
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.exists() else f"{header}; install Python's development files"


def explain_compiler(error: Exception) -> str:
    """Return what to do about an ``error`` of dynamo, inductor or Triton; "" for any other."""
    if not type(error).__module__.startswith(("torch._dynamo.", "torch._inductor.", "triton.")):
        return ""
    return (
        "the model could not be compiled: --set COMPILE=False trains without a compiler "
        f"({first_line(error)})"
    )


def count_graphs() -> int:
    """Return the number of graphs that dynamo has compiled so far in this process."""
    # Importing it takes seconds, for nothing if nothing was compiled.
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo.utils.counters["stats"]["unique_graphs"] if dynamo else 0


def _repair_random_numbers() -> None:
    """Let inductor draw each random number alone on a GPU.

    torch 2.13 and 2.14 draw four at once, which makes wrong dropout masks (pytorch issue 198333);
    2.15 does with TORCHINDUCTOR_USE_RAND4X=1 only.
    """
    # Seconds, which inductor takes anyway.
    from torch._inductor.codegen.triton import TritonOverrides

    if hasattr(TritonOverrides, "_can_use_4x_random"):
        TritonOverrides._can_use_4x_random = staticmethod(lambda: False)


def compile_model(
    model: nn.Module,
    how: bool | str | None,
    backend: str | Callable[..., Any] = "inductor",
    sizes: int = 1,
) -> None:
    """Compile ``model`` in place, for each of ``sizes`` shapes of images anew; names stay the same.

    ``how``: "model" as a whole, anything else its ``blocks`` one by one. Identical blocks are
    compiled once, and with several ranks gradients are reduced while the backward pass continues; a
    whole model has all its gradients at the end. "max-autotune" measures several kernels for each
    matrix product and takes the fastest, without CUDA graphs: one graph for all blocks would be
    recorded anew for the weights of each.
    """
    # With AMP_TYPE.NAIVE every block is compiled separately, and beyond the limit dynamo stops.
    blocks = list(getattr(model, "blocks", [model]))
    limit = GRAPHS_PER_BLOCK * len(blocks) * sizes
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    # Graphs are not split where DDP's buckets end: a block's is small enough to overlap with the
    # communication of the one before.
    torch._dynamo.config.optimize_ddp = False
    if backend == "inductor":
        _repair_random_numbers()
    mode = "max-autotune-no-cudagraphs" if how == "max-autotune" else None
    # `Module.compile` works in place and keeps the names of parameters.
    for part in [model] if how == "model" else blocks:
        # For the second size dynamo would make a graph for any size, which is slower.
        part.compile(backend=backend, mode=mode, dynamic=False)
