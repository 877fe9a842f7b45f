"""Layers with sharded weights and activations; see `layout` for the modes.

The matrix products are Colossal-AI's. Its layers (legacy/nn/layer/parallel_*/layers.py), which
`upstream_layers` repairs for scripts of users, are not used: they communicate every bias and layer
norm weight of a 2d or 2.5d model in the forward and backward pass of every micro-batch. Here these
are sharded like the activations, and `sum_partial_gradients` sums their gradients once per step.

Shape suffixes: B samples, N tokens, D channels of this rank; R ranks; [...] leading dimensions.
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


class ShardedLinear(nn.Module):
    """A linear layer with this rank's shard of ``weight`` [in, out] and ``bias`` [out].

    ``multiply`` of each mode returns this rank's shard of the product of the full ``x`` [..., in]
    and ``weight``. The product runs in autocast's dtype with autocast disabled: upstream's products
    cast to float16 even under bfloat16 autocast on GPUs, and fail under autocast on CPUs
    (``custom_fwd`` in legacy/nn/layer/parallel_2d/_operation.py:223 and the other modes' files).
    """

    multiply: Callable[[Tensor, Tensor], Tensor]

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter):
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        # With AMP_TYPE.NAIVE x is in half precision already: the layer norm before returns it so.
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            return self.multiply(x.to(dtype), self.weight.to(dtype)) + self.bias.to(dtype)


class ColumnLinear(ShardedLinear):
    """1d: all input channels, a slice of the output channels."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        # `reduce_grad` is the identity. Its backward pass sums the gradient of x over the ranks.
        return reduce_grad(x, TENSOR) @ weight


class RowLinear(ShardedLinear):
    """A slice of the input channels, all output channels, summed over the ranks of ``group``."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, group: ParallelMode = TENSOR):
        super().__init__(weight, bias)
        self.group = group

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        # `reduce_input` sums over the ranks. Its backward pass is the identity.
        return reduce_input(x @ weight, self.group)


class Linear2D(ShardedLinear):
    """2d: SUMMA, in which each rank of a row broadcasts its x, each of a column its weight."""

    product = Matmul_AB_2D
    row = ROW_2D
    col = COL_2D
    groups = (COL_2D, ROW_2D)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        out_shape = (*x.shape[:-1], weight.shape[1])
        return self.product.apply(
            x,
            weight,
            gpc.get_world_size(self.row),
            out_shape,
            # This rank's row and column, and its square in 2.5d.
            *map(gpc.get_local_rank, self.groups),
            self.row,
            self.col,
            # Upstream computes the global ranks that broadcast from these four.
            gpc.get_local_rank(ParallelMode.DATA),
            0,  # pipeline stage
            1,  # pipeline stages
            gpc.get_world_size(TENSOR),
        )


class Linear2p5D(Linear2D):
    """2.5d: SUMMA within each of the squares."""

    product = Matmul_AB_2p5D
    row = ROW_2P5D
    col = COL_2P5D
    groups = (COL_2P5D, ROW_2P5D, DEPTH_2P5D)


class Linear3D(ShardedLinear):
    """3d: reads channels split over OUTPUT and writes channels split over INPUT, or vice versa."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, *, second: bool = False):
        super().__init__(weight, bias)
        # Upstream's names are those of the first layer, which gathers x over INPUT.
        self.groups = (
            (OUTPUT_3D, WEIGHT_3D, INPUT_3D) if second else (INPUT_3D, WEIGHT_3D, OUTPUT_3D)
        )
        if weight.requires_grad:
            # The hook waits for the product's asynchronous gradient reduction.
            register_async_grad_hook(weight)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        # The hook above finds the reduction by this number.
        return Matmul3D.apply(x, weight, id(self.weight), *self.groups)


class ShardedNorm(nn.Module):
    """Layer norm in float32, or without a bias RMSNorm; the channels are split over ``group``.

    With AMP_TYPE.NAIVE, input and weights have been rounded to half precision before.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, eps: float, group: ParallelMode
    ):
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.group = group

    def forward(self, x_BND: Tensor) -> Tensor:
        return LayerNormFunction.apply(x_BND.float(), self.weight, self.bias, self.eps, self.group)


class LayerNormFunction(torch.autograd.Function):
    """Layer norm with one collective in each direction; RMSNorm where ``bias`` is None."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BND: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        group: ParallelMode,
    ) -> Tensor:
        variance_BN1, mean_BN1 = torch.var_mean(x_BND, dim=-1, correction=0, keepdim=True)
        moments = torch.stack((variance_BN1, mean_BN1))  # over this rank's channels
        moments_R2BN1 = all_gather(moments, 0, group).unflatten(0, (-1, 2))
        variances_RBN1, means_RBN1 = moments_R2BN1.unbind(1)
        # RMSNorm takes 0 for the mean: the variance is then the mean square.
        mean_BN1 = torch.zeros_like(mean_BN1) if bias is None else means_RBN1.mean(0)
        # The variance within ranks plus that between: E[x^2] - E[x]^2 loses digits by cancellation.
        variance_BN1 = (variances_RBN1 + (means_RBN1 - mean_BN1).square()).mean(0)
        reciprocal_BN1 = (variance_BN1 + eps).rsqrt()
        normalised_BND = (x_BND - mean_BN1) * reciprocal_BN1
        ctx.save_for_backward(normalised_BND, reciprocal_BN1, weight)
        ctx.group = group
        ctx.has_bias = bias is not None
        if bias is None:
            return normalised_BND * weight
        return torch.addcmul(bias, normalised_BND, weight)

    @staticmethod
    def backward(ctx: Any, grad_BND: Tensor) -> tuple[Tensor | None, ...]:
        normalised_BND, reciprocal_BN1, weight = ctx.saved_tensors
        # Sums over this rank's samples: `sum_partial_gradients` adds those of the other ranks.
        weight_grad = (grad_BND * normalised_BND).flatten(0, -2).sum(0)
        bias_grad = grad_BND.flatten(0, -2).sum(0) if ctx.has_bias else None
        grad_BND = grad_BND * weight
        sums_2BN1 = torch.stack(
            [
                grad_BND.mean(-1, keepdim=True),
                (grad_BND * normalised_BND).mean(-1, keepdim=True),
            ]
        )
        # Ranks have equally many channels: the mean of their means is that of all channels.
        means_2BN1 = all_reduce(sums_2BN1, ctx.group) / gpc.get_world_size(ctx.group)
        if not ctx.has_bias:
            means_2BN1[0] = 0  # RMSNorm's mean is constant
        x_grad_BND = reciprocal_BN1 * (grad_BND - means_2BN1[0] - normalised_BND * means_2BN1[1])
        return x_grad_BND, weight_grad, bias_grad, None, None


class RankSeeded(nn.Module):
    """Run ``layer`` with random numbers that ranks share if they have the same ``number``.

    They are derived from the default generator's state, which is equal within a tensor-parallel
    group, and which PyTorch restores when it recomputes checkpointed activations.
    """

    def __init__(self, layer: nn.Module, number: int):
        super().__init__()
        self.layer = layer
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.layer(x)
        with random_stream(x.device, self.number):
            return self.layer(x)


@contextmanager
def random_stream(device: torch.device, number: int) -> Iterator[None]:
    """Seed the device's default generator by its state and ``number``; restore it, and advance."""
    generator = (
        torch.cuda.default_generators[device.index]
        if device.type == "cuda"
        else torch.default_generator
    )
    state = generator.get_state()
    # The state changes with every draw: no two layers or passes get the same seed.
    text = state.numpy().tobytes() + number.to_bytes(8, "big")
    digest = hashlib.blake2b(text, digest_size=7).digest()  # a seed has at most 63 bits
    generator.manual_seed(int.from_bytes(digest, "big"))
    try:
        yield
    finally:
        generator.set_state(state)
        # One draw advances the state: the next layer gets another seed.
        torch.rand((), device=device)
