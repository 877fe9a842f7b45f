"""Layers that compute in half precision on float32 parameters."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from common.colossal.tensor_parallel.layers import Linear as ShardedLinear


def compute_in_half(model: nn.Module, dtype: torch.dtype) -> None:
    """Make every layer of ``model`` compute in ``dtype`` on casts of its float32 parameters, the master weights.

    Upstream (legacy/amp/naive_amp/_fp16_optimizer.py) casts the model itself: its parameters are then not those of the
    optimizer, and gradients are accumulated over micro-batches in half precision.
    """
    model.register_forward_pre_hook(partial(_cast_inputs, dtype=dtype), with_kwargs=True)
    for layer in model.modules():
        if isinstance(layer, _NormBase):
            layer.forward = partial(_forward_in_own_type, layer, layer.forward, dtype)
            continue
        # a sharded linear layer casts its weights to the dtype of its input
        if layer._parameters and not isinstance(layer, ShardedLinear):
            layer.forward = partial(_forward_on_copies, layer, layer.forward, dtype)


def _cast_inputs(
    model: nn.Module, inputs: tuple[Any, ...], named_inputs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, (inputs, named_inputs))


def _forward_in_own_type(layer: _NormBase, forward: Any, dtype: torch.dtype, inputs: Tensor) -> Tensor:
    """Normalize in the dtype of the parameters and running statistics, which must be the same."""
    own = [*layer._parameters.values(), *layer._buffers.values()]
    own_dtype = next((t.dtype for t in own if t is not None and t.is_floating_point()), torch.float32)
    return forward(inputs.to(own_dtype)).to(dtype)


def _forward_on_copies(layer: nn.Module, forward: Any, dtype: torch.dtype, *inputs: Any, **named_inputs: Any) -> Tensor:
    """Call ``forward`` with cast parameters; done per layer because checkpointed layers run again in backward."""
    masters: dict[str, Any] = dict(layer._parameters)
    layer._parameters.update({name: master.to(dtype) for name, master in masters.items() if master is not None})
    try:
        return forward(*inputs, **named_inputs).to(dtype)
    finally:
        layer._parameters.update(masters)
