"""Layers that compute in half precision while their parameters stay as they are."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from common.colossal.tensor_parallel.layers import Linear as ShardedLinear


def compute_in_half(model: nn.Module, dtype: torch.dtype) -> None:
    """Let every layer of ``model`` from now on compute in ``dtype``, on copies of its parameters.

    Parameters, their gradients, and so what the optimizer and a checkpoint hold, keep their type: they are the masters,
    and autograd casts between the two. What a layer norm or a softmax sums, it sums in float32, whatever its input.

    Upstream (legacy/amp/naive_amp/_fp16_optimizer.py) halves the model and keeps the masters to the optimizer, which
    then no longer knows the model's parameters; gradients of micro-batches are added up in half.
    """
    model.register_forward_pre_hook(partial(_cast_inputs, dtype=dtype), with_kwargs=True)
    for layer in model.modules():
        if isinstance(layer, _NormBase):
            layer.forward = partial(_forward_in_own_type, layer, layer.forward, dtype)
            continue
        # sharded matrix products cast their own weights to the type of their input
        if layer._parameters and not isinstance(layer, ShardedLinear):
            layer.forward = partial(_forward_on_copies, layer, layer.forward, dtype)


def _cast_inputs(
    model: nn.Module, inputs: tuple[Any, ...], named_inputs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(cast, inputs)), {name: cast(value) for name, value in named_inputs.items()}


def _forward_in_own_type(layer: _NormBase, forward: Any, dtype: torch.dtype, inputs: Tensor) -> Tensor:
    """Normalise a batch in the type of its running statistics, which halves of the parameters would not match."""
    own = [
        t for t in (*layer._parameters.values(), *layer._buffers.values()) if t is not None and t.is_floating_point()
    ]
    return forward(inputs.to(own[0].dtype if own else torch.float32)).to(dtype)


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
