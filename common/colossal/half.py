"""Layers that compute in half precision while their parameters stay as they are."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common.colossal.tensor_parallel.layers import Linear as ShardedLinear


def compute_in_half(model: nn.Module, dtype: torch.dtype) -> None:
    """Let every layer of ``model`` from now on compute in ``dtype``, on copies of its parameters.

    Parameters, their gradients, and so what the optimiser and a checkpoint hold, keep their type: they are the masters,
    and autograd casts between the two. What a layer norm or a softmax sums, it sums in float32, whatever its input.

    Upstream (legacy/amp/naive_amp/_fp16_optimizer.py) halves the model and keeps the masters to the optimiser, which
    then no longer knows the model's parameters; gradients of micro-batches are added up in half.
    """
    model.register_forward_pre_hook(partial(_cast_inputs, dtype=dtype))
    for layer in model.modules():
        # sharded matrix products cast their own weights to the type of their input
        if layer._parameters and not isinstance(layer, ShardedLinear):
            layer.forward = partial(_forward_on_copies, layer, layer.forward, dtype)


def _cast_inputs(model: nn.Module, inputs: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(
        value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value for value in inputs
    )


def _forward_on_copies(layer: nn.Module, forward: Any, dtype: torch.dtype, *inputs: Any, **named_inputs: Any) -> Tensor:
    """Call ``forward`` while copies take the place of the layer's own parameters.

    Each layer does so for itself, because one whose activations are checkpointed runs once more in the backward pass.
    """
    masters = dict(layer._parameters)
    layer._parameters.update({name: master.to(dtype) for name, master in masters.items() if master is not None})
    try:
        return forward(*inputs, **named_inputs).to(dtype)
    finally:
        layer._parameters.update(masters)
