"""Check the sizes and shapes that tensor parallelism requires, without process groups."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from common.colossal.tensor_parallel.layout import LAYOUTS, group_sizes, plan_shards
from common.errors import UserError, nearest_multiples


def resolve_parallel(parallel: Mapping[str, Any] | None, world_size: int) -> dict[str, Any]:
    """Return ``parallel`` in full, with mode None for tensor parallelism of size 1.

    Upstream crashes in the backward pass of 2d, 2.5d and 3d layers of size 1, and ignores a size without a mode. Raises
    `UserError` for a size without a mode, a pipeline, and a size that is invalid for the mode or does not divide
    ``world_size``.
    """
    parallel = dict(parallel or {})
    pipeline, tensor = parallel.get("pipeline", 1), parallel.get("tensor") or {}
    stages = pipeline["size"] if isinstance(pipeline, Mapping) else pipeline
    if stages != 1:
        raise UserError(f"parallel.pipeline={stages}: pipeline parallelism is not supported; set it to 1")
    tensor = dict(tensor) if isinstance(tensor, Mapping) else {"size": tensor}
    size, mode = tensor.get("size", 1), tensor.get("mode")
    if size == 1:
        return {"pipeline": 1, "tensor": {"size": 1, "mode": None}}
    _check_size(mode, size, tensor.get("depth"))
    if world_size % size:
        nearest = nearest_multiples(world_size, size)
        raise UserError(
            f"parallel.tensor.size={size} does not divide the {world_size} processes: start {nearest} processes"
        )
    return {"pipeline": 1, "tensor": tensor}


def _check_size(mode: str | None, size: int, depth: int | None) -> None:
    if mode not in LAYOUTS:
        modes = ", ".join(map(repr, LAYOUTS))
        raise UserError(f"parallel.tensor.size={size} needs parallel.tensor.mode: one of {modes}, not {mode!r}")
    if mode != "2.5d" and depth is not None:
        raise UserError(f"parallel.tensor.depth={depth} requires mode '2.5d', not {mode!r}: remove it")
    if mode == "2.5d" and (not isinstance(depth, int) or depth < 1):
        raise UserError(
            f"parallel.tensor.depth={depth}: mode '2.5d' needs size = depth x a square, such as depth=1 with size 4 or "
            "9, depth=2 with size 8 or 18"
        )
    shape, power = {"1d": ("a number", 1), "2d": ("a square", 2), "2.5d": (f"depth {depth} x a square", 2)}.get(
        mode, ("a cube", 3)
    )
    squares = depth or 1
    side = max(2, math.floor((size / squares) ** (1 / power) + 1e-9))
    if squares * side**power != size:
        raise UserError(
            f"parallel.tensor.size={size} is not {shape} with sides of at least 2, which mode {mode!r} requires; "
            f"nearest: {squares * side**power} or {squares * (side + 1) ** power}"
        )


def check_tensor_parallel(
    parallel: Mapping[str, Any] | None, model: Mapping[str, Any], micro_batch: int, world_size: int
) -> None:
    """Raise `UserError` if a model (the config's MODEL) or a micro-batch cannot be split evenly over the ranks."""
    tensor = resolve_parallel(parallel, world_size)["tensor"]
    mode, size, depth = tensor["mode"], tensor["size"], tensor.get("depth", 1)
    if mode is None:
        return
    heads, width, mlp_ratio = model["heads"], model["width"], model["mlp_ratio"]
    sizes, layout = group_sizes(mode, size, depth), LAYOUTS[mode]
    side = size if mode == "1d" else sizes[layout.channels]
    # A 3d weight is split along its input channels twice.
    width_unit = math.lcm(side**2, heads) if mode == "3d" else heads
    hidden, hidden_unit = int(width * mlp_ratio), side**2 if mode == "3d" else side
    rules = (
        ("MODEL.heads", heads, side),
        ("MODEL.width", width, width_unit),
        ("the MLP's width, MODEL.width x MODEL.mlp_ratio", hidden, hidden_unit),
        ("the micro-batch (MICRO_BATCH_SIZE)", micro_batch, sizes[layout.samples]),
    )
    for name, value, unit in rules:
        if value % unit:
            raise UserError(
                f"{name}={value} is not a multiple of {unit}, which parallel.tensor mode {mode!r} of size {size} "
                f"requires; nearest: {nearest_multiples(value, unit)}"
            )


def describe_tensor_parallel(parallel: Mapping[str, Any], model: nn.Module, micro_batch: int) -> str:
    """Return what each rank of a tensor-parallel group holds: all hold equal amounts.

    ``parallel`` is resolved and has a mode; ``model`` is not sharded, and may be on the meta device.
    """
    tensor = parallel["tensor"]
    mode, size = tensor["mode"], tensor["size"]
    layout, sizes = LAYOUTS[mode], group_sizes(mode, size, tensor.get("depth", 1))
    shards = [shard for _, shard in plan_shards(model, mode)]
    held, whole = sum(shard.numel(sizes) for shard in shards), sum(math.prod(shard.shape) for shard in shards)
    width: Any = model.head.in_features
    heads, side = width // model.blocks[0].attn.head_width, size if mode == "1d" else sizes[layout.channels]
    return (
        f"{micro_batch // sizes[layout.samples]} of {micro_batch} samples, "
        f"{width // sizes[layout.channels]} of {width} channels between blocks, {heads // side} of {heads} heads, "
        f"{held:,} of {whole:,} parameters"
    )
