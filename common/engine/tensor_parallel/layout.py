"""How each tensor-parallel mode shards the activations and parameters of a Vision Transformer.

Every rank of a tensor-parallel group is given the same micro-batch. In the model's forward pass it
keeps its samples (`shard_tensor_parallel`). Between blocks, activations [B, N, D] are split by
samples (B) over one group of ranks and by channels (D) over another. A block has two pairs of
linear layers (`linear_pairs`).

- 1d (Megatron-LM, arXiv 1909.08053): between blocks every rank has all samples and channels; within
  a block it has a slice of the heads and of the hidden channels.
- 2d (Optimus, arXiv 2104.05343): a square of ranks; COL splits samples, ROW splits channels. A ROW
  group is the ranks of one row of the square: its members differ in the column. So the members of
  a COL group have different samples, those of a ROW group different channels.
- 2.5d (Tesseract, arXiv 2105.14500): ``depth`` such squares with equal weights and different
  samples, which XZ splits.
- 3d (arXiv 2105.14450): a cube; INPUT x WEIGHT splits samples and OUTPUT channels; within a pair,
  OUTPUT x WEIGHT splits samples and INPUT channels.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.engine.linear_pairs import FIRST_LAYERS, SECOND_LAYERS, count_matrices
from common.engine.upstream import ParallelMode, gpc
from common.errors import UserError
from common.files import Values
from common.text import nearest_multiples

TENSOR = ParallelMode.TENSOR
ROW_2D = ParallelMode.PARALLEL_2D_ROW
COL_2D = ParallelMode.PARALLEL_2D_COL
ROW_2P5D = ParallelMode.PARALLEL_2P5D_ROW
COL_2P5D = ParallelMode.PARALLEL_2P5D_COL
DEPTH_2P5D = ParallelMode.PARALLEL_2P5D_DEP
XZ_2P5D = ParallelMode.PARALLEL_2P5D_XZ
INPUT_3D = ParallelMode.PARALLEL_3D_INPUT
WEIGHT_3D = ParallelMode.PARALLEL_3D_WEIGHT
OUTPUT_3D = ParallelMode.PARALLEL_3D_OUTPUT
INPUT_X_WEIGHT_3D = ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT
OUTPUT_X_WEIGHT_3D = ParallelMode.PARALLEL_3D_OUTPUT_X_WEIGHT


def position_of(rank: int, group: ParallelMode) -> int:
    """Return the local rank that a global ``rank`` has in its group of this kind.

    Ranks of one group have equal distances, except in the groups of 3D that join two of its axes.
    """
    first, second, *_ = ranks = gpc.get_ranks_in_group(group)
    return rank // (second - first) % len(ranks)


def _chunk(length: int, rank: int) -> tuple[int, int]:
    """Return where the part of a data-parallel rank starts, and its length; it may be 0."""
    # FSDP cuts as torch.chunk does: the last parts may be smaller, or empty.
    size = -(-length // gpc.get_world_size(ParallelMode.DATA))
    start = min(size * position_of(rank, ParallelMode.DATA), length)
    return start, min(size, length - start)


@dataclass(frozen=True)
class Sharding:
    """How a parameter is sharded; the attribute ``sharding`` of this rank's local tensor.

    Attributes:
        cuts: (dimension, group), in order: the dimension is split evenly over the group's ranks.
        replicated_over: the group of ranks with the same shard, if more than one.
        summed_over: the group of replicas with different samples; their gradients must be summed.
        fused: number of matrices stacked along dimension 0 that are split separately (3 for q, k
            and v).
        transposed: whether the shard is stored as [in, out], as Colossal-AI's products take it.
        shape: shape of the full parameter.
        part: the dimension of the shard that ``zero`` cuts over the data-parallel ranks.

    A ``rank`` is a global one.
    """

    cuts: tuple[tuple[int, ParallelMode], ...] = ()
    replicated_over: ParallelMode | None = None
    summed_over: ParallelMode | None = None
    fused: int = 1
    transposed: bool = False
    shape: tuple[int, ...] = ()
    part: int | None = None

    @property
    def copies(self) -> int:
        """The number of ranks of the tensor-parallel group that have this shard."""
        group = self.replicated_over
        return 1 if group is None else gpc.get_world_size(group)

    def cut(self, full: Tensor, rank: int | None = None) -> Tensor:
        """Return a copy of the shard of ``full`` that ``rank`` has, by default this one."""
        rank = gpc.get_global_rank() if rank is None else rank
        local = self._orient(self._view(full, rank).flatten(0, 1))
        if self.part is not None:
            local = local.narrow(self.part, *_chunk(local.shape[self.part], rank))
        return local.clone(memory_format=torch.contiguous_format)

    def write(self, local: Tensor, full: Tensor, rank: int) -> None:
        """Copy ``local``, the shard of ``rank``, to its position in ``full``."""
        if self.part is not None:
            # A data-parallel rank fills only its part of the tensor-parallel shard.
            padded = replace(self, part=None).cut(full, rank)
            padded.narrow(self.part, *_chunk(padded.shape[self.part], rank)).copy_(local)
            local = padded
        self._view(full, rank).copy_(self._orient(local).unflatten(0, (self.fused, -1)))

    def local_shape(self, rank: int) -> list[int]:
        """Return the shape of the shard that ``rank`` has."""
        shape = list(self.shape)
        for dim, group in self.cuts:
            shape[dim] //= gpc.get_world_size(group)
        if self.transposed:
            shape.reverse()
        if self.part is not None:
            _, shape[self.part] = _chunk(shape[self.part], rank)
        return shape

    def _view(self, full: Tensor, rank: int) -> Tensor:
        """Return the shard of ``full``, before ``part``, as a view [fused, ...]."""
        view = full.unflatten(0, (self.fused, -1))  # for qkv: [3 D, D] to [3, D, D]
        for dim, group in self.cuts:
            # 3d cuts one dimension twice: each cut is of the last one's result.
            view = view.unflatten(dim + 1, (gpc.get_world_size(group), -1))
            view = view.select(dim + 1, position_of(rank, group))
        return view

    def _orient(self, matrix: Tensor) -> Tensor:
        return matrix.t() if self.transposed else matrix


@dataclass(frozen=True)
class Layout:
    """How one mode splits a model.

    Attributes:
        samples: the group that splits the samples between blocks, if any.
        channels: the group that splits the channels between blocks, if any.
        first: (weight, bias) of a pair's first linear layer.
        second: (weight, bias) of its second.
    """

    samples: ParallelMode | None
    channels: ParallelMode | None
    first: tuple[Sharding, Sharding]
    second: tuple[Sharding, Sharding]


def _matrix(
    *cuts: tuple[int, ParallelMode], replicated_over: ParallelMode | None = None
) -> Sharding:
    """Return how a weight [out, in] is sharded."""
    return Sharding(cuts, replicated_over, summed_over=replicated_over, transposed=True)


def _vector(channels: ParallelMode, samples: ParallelMode) -> Sharding:
    """Return how a bias or a norm's weight is sharded: like the activations that it is added to."""
    return Sharding(((0, channels),), replicated_over=samples, summed_over=samples)


# (weight [out, in], bias [out]). SUMMA wants the weight's inputs over COL, although the channels of
# the activations are over ROW. The product leaves its outputs over ROW.
_SQUARE = (_matrix((1, COL_2D), (0, ROW_2D)), _vector(ROW_2D, COL_2D))
# XZ is a column of all squares together: each of its ranks has different samples.
_SQUARES = (
    _matrix((1, COL_2P5D), (0, ROW_2P5D), replicated_over=DEPTH_2P5D),
    _vector(ROW_2P5D, XZ_2P5D),
)
LAYOUTS = {
    "1d": Layout(
        samples=None,
        channels=None,
        # The outputs, heads or hidden channels, are split.
        first=(_matrix((0, TENSOR)), Sharding(((0, TENSOR),))),
        # The inputs are split. Each rank adds the full bias to the sum over ranks.
        second=(_matrix((1, TENSOR)), Sharding(replicated_over=TENSOR)),
    ),
    "2d": Layout(COL_2D, ROW_2D, first=_SQUARE, second=_SQUARE),
    "2.5d": Layout(XZ_2P5D, ROW_2P5D, first=_SQUARES, second=_SQUARES),
    "3d": Layout(
        INPUT_X_WEIGHT_3D,
        OUTPUT_3D,
        first=(
            _matrix((1, OUTPUT_3D), (0, INPUT_3D), (1, WEIGHT_3D)),
            _vector(INPUT_3D, OUTPUT_X_WEIGHT_3D),
        ),
        second=(
            _matrix((1, INPUT_3D), (0, OUTPUT_3D), (1, WEIGHT_3D)),
            _vector(OUTPUT_3D, INPUT_X_WEIGHT_3D),
        ),
    ),
}


# What the ranks form, with the depth, and the power of a side that is their number.
SHAPES = {
    "1d": ("a number", 1),
    "2d": ("a square", 2),
    "2.5d": ("depth {} x a square", 2),
    "3d": ("a cube", 3),
}


def name_shardings(model: nn.Module, mode: str) -> Iterator[tuple[str, Sharding]]:
    """Yield (name, sharding) for every parameter of the Vision Transformer ``model``."""
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        sharding = _sharding_of(name, parameter, LAYOUTS[mode])
        # A rank needs the same heads of queries, keys and values; a bias is cut as its weight.
        layer = name.rpartition(".")[0]
        fused = count_matrices(f"{layer}.weight", shapes) or 1
        yield name, replace(sharding, shape=parameter.shape, fused=fused)


def _sharding_of(name: str, parameter: Tensor, layout: Layout) -> Sharding:
    """Return how ``parameter`` is sharded, but for its shape, by its ``name`` in the model."""
    layer, _, role = name.rpartition(".")
    if layer.endswith(FIRST_LAYERS):
        return layout.first[role == "bias"]
    if layer.endswith(SECOND_LAYERS):
        return layout.second[role == "bias"]
    # What follows is outside of the pairs.
    if name == "head.bias" or layout.channels is None:
        return Sharding(replicated_over=TENSOR, summed_over=layout.samples)
    if name == "head.weight":
        # Split like the activations' channels. Every rank has all classes.
        return _matrix((1, layout.channels), replicated_over=layout.samples)
    # Norms and biases are [D]; class token and positions are [1, N, D].
    dim = 2 if parameter.ndim == 3 else 0
    return Sharding(
        ((dim, layout.channels),), replicated_over=layout.samples, summed_over=layout.samples
    )


def resolve_parallel(parallel: Values | None, world_size: int) -> dict[str, Any]:
    """Return ``parallel`` with all its keys, and mode None for tensor parallelism of size 1.

    Upstream crashes in the backward pass of 2d, 2.5d and 3d layers of size 1, and ignores a size
    without a mode (legacy/context/parallel_context.py:450).

    Raises:
        UserError: for a size without a mode, a pipeline, and a size that is invalid for the mode
            or does not divide ``world_size``.
    """
    parallel = parallel or {}
    stages = parallel.get("pipeline", 1)
    # Upstream's own configs write a dict.
    if (stages.get("size") if isinstance(stages, Mapping) else stages) != 1:
        raise UserError(
            f"parallel.pipeline={stages}: pipeline parallelism is not supported; set it to 1"
        )
    tensor = parallel.get("tensor") or {}
    size = tensor.get("size", 1)
    if size == 1:
        return {"pipeline": 1, "tensor": {"size": 1, "mode": None}}
    _check_size(tensor.get("mode"), size, tensor.get("depth"))
    if world_size % size:
        raise UserError(
            f"parallel.tensor.size={size} does not divide the {world_size} processes: "
            f"start {nearest_multiples(world_size, size)} processes"
        )
    return {"pipeline": 1, "tensor": dict(tensor)}


def _check_size(mode: str | None, size: int, depth: int | None) -> None:
    """Raise `UserError` unless ``size`` ranks form the square, squares or cube of ``mode``."""
    if mode not in LAYOUTS:
        modes = ", ".join(map(repr, LAYOUTS))
        raise UserError(
            f"parallel.tensor.size={size} needs parallel.tensor.mode: one of {modes}, not {mode!r}"
        )
    if mode != "2.5d" and depth is not None:
        raise UserError(
            f"parallel.tensor.depth={depth} requires mode '2.5d', not {mode!r}: remove it"
        )
    shape, power = SHAPES[mode]
    shape = shape.format(depth)
    squares = depth or 1
    # 1e-9, because the cube root of 64 is 3.9999999999999996.
    side = max(2, math.floor((size / squares) ** (1 / power) + 1e-9))
    if squares * side**power != size:
        raise UserError(
            f"parallel.tensor.size={size} is not {shape} with sides of at least 2, which mode "
            f"{mode!r} requires; nearest: {squares * side**power} or "
            f"{squares * (side + 1) ** power}"
        )


def side_of(tensor: Values) -> int:
    """Return the ranks along a side of the square or cube of the config's parallel.tensor."""
    return round((tensor["size"] // tensor.get("depth", 1)) ** (1 / SHAPES[tensor["mode"]][1]))


def check_tensor_parallel(parallel: Values, model: Values, micro_batch: int) -> None:
    """Raise `UserError` if the ranks cannot divide a model (the config's MODEL) or a micro-batch.

    ``parallel`` is resolved.
    """
    tensor = parallel["tensor"]
    mode = tensor["mode"]
    if mode is None:
        return
    # `_sharding_of` knows the layers of a plain ViT only.
    if model.get("timm"):
        raise UserError(
            f"MODEL.timm={model['timm']!r} does not support tensor parallel mode {mode!r}: set it "
            "to None, or give a plain ViT by the other keys of MODEL"
        )
    if model.get("stem", "patch") != "patch" or model.get("pool") == "seq":
        raise UserError(
            f"a stem of convolutions and pool='seq' of MODEL do not support tensor parallel mode "
            f"{mode!r}: set it to None"
        )
    depth = tensor.get("depth", 1)
    side = side_of(tensor)  # the heads are split over so many ranks
    # Between blocks so many ranks have different samples.
    samples = {"1d": 1, "2d": side, "2.5d": side * depth, "3d": side**2}[mode]
    of_batch = ("the micro-batch (MICRO_BATCH_SIZE)", micro_batch, samples)
    for name, value, divisor in (*_rules_of(model, mode, side), of_batch):
        if value % divisor:
            remedy = nearest_multiples(value, divisor)
            if "MODEL" in name:
                sides = [n for n in range(2, model["heads"] + 1) if _can_divide(model, mode, n)]
                sizes = [str(depth * n ** SHAPES[mode][1]) for n in sides]
                remedy += f"; sizes that this MODEL allows: {', '.join(sizes) or 'none'}"
            raise UserError(
                f"{name}={value} is not a multiple of {divisor}, which parallel.tensor mode "
                f"{mode!r} of size {tensor['size']} requires; nearest: {remedy}"
            )


def _rules_of(model: Values, mode: str, side: int) -> list[tuple[str, int, int]]:
    """Return the names and sizes of the model that ``side`` divides, and by what."""
    heads = model["heads"]
    width = model["width"]
    hidden_width = int(width * model["mlp_ratio"])
    matrices = 2 if model.get("mlp") == "swiglu" else 1
    # 3d splits a weight along its input channels twice.
    unit = side**2 if mode == "3d" else side
    return [
        ("MODEL.heads", heads, side),
        # All heads have the same number of channels.
        ("MODEL.width", width, math.lcm(unit, heads)),
        ("the MLP's width, MODEL.width x MODEL.mlp_ratio", hidden_width, matrices * unit),
    ]


def _can_divide(model: Values, mode: str, side: int) -> bool:
    return not any(value % divisor for _, value, divisor in _rules_of(model, mode, side))
