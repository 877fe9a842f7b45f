"""Layers with sharded weights and activations; see `layout` for the modes.

The matrix products are Colossal-AI's. Its layers (legacy/nn/layer/parallel_*/layers.py) are not
used, because they

- communicate every bias and layer norm weight of a 2d or 2.5d model in the forward and backward
  pass of every
  micro-batch; here these are sharded like the activations, and `sum_partial_gradients` sums
  gradients once per step,
- compute a layer norm's variance as E[x^2] - E[x]^2, which overflows in half precision
  (parallel_2d/layers.py:337,
  parallel_2p5d/layers.py:350, parallel_3d/_operation.py:325),
- split a 3d batch over the group set by the last layer built (parallel_3d/_operation.py:452), and
  fail in a 3d
  classifier's backward pass on ranks off the cube's diagonal (parallel_3d/_operation.py:135).

Shape suffixes: B samples, N tokens, D channels of this rank; [...] any leading dimensions.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from common.engine.tensor_parallel.layout import (
    COL_2D,
    COL_2P5D,
    DEPTH_2P5D,
    INPUT_3D,
    OUTPUT_3D,
    ROW_2D,
    ROW_2P5D,
    TENSOR,
    WEIGHT_3D,
)
from common.engine.upstream import (
    Matmul3D,
    Matmul_AB_2D,
    Matmul_AB_2p5D,
    ParallelMode,
    all_gather,
    all_reduce,
    gpc,
    reduce_grad,
    reduce_input,
    register_async_grad_hook,
)


class Linear(nn.Module):
    """A linear layer with this rank's shard of ``weight`` [in, out] and ``bias`` [out].

    ``multiply`` of each mode returns this rank's shard of the product of the full ``x`` [..., in]
    and ``weight``. The product runs in autocast's dtype with autocast disabled: upstream's products
    cast to float16 even under bfloat16 autocast on GPUs, and fail under autocast on CPUs
    (``custom_fwd`` in legacy/nn/layer/parallel_2d/_operation.py:223 and the other modes' files).
    """

    multiply: Callable[[Tensor, Tensor], Tensor]

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            return self.multiply(x.to(dtype), self.weight.to(dtype)) + self.bias.to(dtype)


class ColumnLinear(Linear):
    """1d: all input channels, a slice of the output channels."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return reduce_grad(x, TENSOR) @ weight


class RowLinear(Linear):
    """A slice of the input channels, all output channels, summed over the ranks of ``group``."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter, group: ParallelMode = TENSOR
    ) -> None:
        super().__init__(weight, bias)
        self.group = group

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return reduce_input(x @ weight, self.group)


class Linear2D(Linear):
    """2d: SUMMA."""

    product = Matmul_AB_2D
    row = ROW_2D
    col = COL_2D
    groups = (COL_2D, ROW_2D)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        ranks = map(gpc.get_local_rank, self.groups)
        # data-parallel rank, pipeline stage, stages and tensor-parallel size, which give the global
        # ranks
        world = gpc.get_local_rank(ParallelMode.DATA), 0, 1, gpc.get_world_size(TENSOR)
        out_shape = (*x.shape[:-1], weight.shape[1])
        return self.product.apply(
            x, weight, gpc.get_world_size(self.row), out_shape, *ranks, self.row, self.col, *world
        )


class Linear2p5D(Linear2D):
    """2.5d: SUMMA within each of the squares."""

    product = Matmul_AB_2p5D
    row = ROW_2P5D
    col = COL_2P5D
    groups = (COL_2P5D, ROW_2P5D, DEPTH_2P5D)


class Linear3D(Linear):
    """3d: reads channels split over OUTPUT and writes channels split over INPUT, or vice versa."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, *, second: bool = False) -> None:
        super().__init__(weight, bias)
        self.groups = (
            (OUTPUT_3D, WEIGHT_3D, INPUT_3D) if second else (INPUT_3D, WEIGHT_3D, OUTPUT_3D)
        )
        if weight.requires_grad:
            register_async_grad_hook(
                weight
            )  # waits for the product's asynchronous gradient reduction

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return Matmul3D.apply(x, weight, id(self.weight), *self.groups)


class LayerNorm(nn.Module):
    """Layer norm in float32; channels, ``weight`` and ``bias`` are split over ``group``."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter, eps: float, group: ParallelMode
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.group = group

    def forward(self, x_BND: Tensor) -> Tensor:
        return _LayerNorm.apply(x_BND.float(), self.weight, self.bias, self.eps, self.group)


class _LayerNorm(torch.autograd.Function):
    """Layer norm with one collective in each direction."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: ParallelMode
    ) -> Tensor:
        moments = torch.stack(torch.var_mean(x, dim=-1, correction=0, keepdim=True))
        variances, means = (
            all_gather(moments, 0, group).unflatten(0, (-1, 2)).unbind(1)
        )  # of each rank's channels
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
        reciprocal = (variance + eps).rsqrt()
        normalised = (x - mean) * reciprocal
        ctx.save_for_backward(normalised, reciprocal, weight)
        ctx.group = group
        return torch.addcmul(bias, normalised, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normalised, reciprocal, weight = ctx.saved_tensors
        weight_grad = (grad * normalised).flatten(0, -2).sum(0)
        bias_grad = grad.flatten(0, -2).sum(0)
        grad = grad * weight
        sums = torch.stack(
            [grad.mean(-1, keepdim=True), (grad * normalised).mean(-1, keepdim=True)]
        )
        means = all_reduce(sums, ctx.group) / gpc.get_world_size(ctx.group)
        return (
            reciprocal * (grad - means[0] - normalised * means[1]),
            weight_grad,
            bias_grad,
            None,
            None,
        )


class OwnRandom(nn.Module):
    """Run ``layer`` with random numbers that are equal on ranks with the same ``number`` and differ
    on others.

    They are derived from the default generator's state, which is equal within a tensor-parallel
    group, and which PyTorch restores when it recomputes checkpointed activations.
    """

    def __init__(self, layer: nn.Module, number: int) -> None:
        super().__init__()
        self.layer = layer
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.layer(x)
        with _random_stream(x.device, self.number):
            return self.layer(x)


@contextmanager
def _random_stream(device: torch.device, number: int) -> Iterator[None]:
    """Seed the device's default generator from its state and ``number``; on exit restore and
    advance it.
    """
    generator = (
        torch.cuda.default_generators[device.index]
        if device.type == "cuda"
        else torch.default_generator
    )
    state = generator.get_state()
    digest = hashlib.blake2b(
        state.numpy().tobytes() + number.to_bytes(8, "big"), digest_size=7
    ).digest()
    generator.manual_seed(int.from_bytes(digest, "big"))
    try:
        yield
    finally:
        generator.set_state(state)
        torch.rand((), device=device)
