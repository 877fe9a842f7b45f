"""torch.compile of a model's blocks."""

import os
import shutil

import torch
from torch import nn

from common.colossal.upstream import ParallelMode, gpc
from common.errors import UserError

GRAPHS_PER_BLOCK = 4  # training and evaluation, with and without gradients


def compile_blocks(model: nn.Module, backend: str = "inductor") -> None:
    """Compile each of ``model.blocks`` in place, keeping all names; equal blocks share one compilation.

    Raises `UserError` for tensor-parallel blocks, whose matrix products are Colossal-AI's autograd functions, and if
    there is no C++ compiler.
    """
    if gpc.get_world_size(ParallelMode.TENSOR) > 1:
        raise UserError("COMPILE=True: compiles no model that is cut over GPUs; leave out COMPILE or the tensor mode")
    compiler = os.environ.get("CXX", "g++")
    if backend == "inductor" and shutil.which(compiler) is None:
        raise UserError(f"COMPILE=True: there is no C++ compiler {compiler}; install it or leave out COMPILE")
    # with AMP_TYPE.NAIVE or drop_path no two blocks share code; beyond the limit none is compiled
    limit = GRAPHS_PER_BLOCK * len(model.blocks)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    # do not split graphs where DDP's buckets end: a block's gradients are ready together, soon enough
    torch._dynamo.config.optimize_ddp = False
    for block in model.get_submodule("blocks").children():
        block.compile(backend=backend)
