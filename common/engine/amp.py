"""Mixed precision: the config's ``fp16 = dict(mode=AMP_TYPE.TORCH, ...)``.

With AMP_TYPE.NAIVE the optimizer's parameters stay float32. In the forward pass each layer casts
its input and its parameters, computes in half precision, and returns half precision; the loss is
float32. The cast's backward pass gives float32 gradients, which add up over micro-batches. So
`Engine.train_step`, tensor parallelism and ZeRO see float32 tensors alone. A sharded linear layer
takes its input's dtype, in which Colossal-AI's product then communicates.
"""

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.modules.batchnorm import _NormBase

from common.engine.tensor_parallel.layers import ShardedLinear
from common.engine.upstream import AMP_TYPE
from common.files import Values
from common.hardware import instruction_set, is_fast


class Cast(Enum):
    """What is cast to half precision; the optimizer's parameters only with PARAMETERS."""

    OPERATIONS = "operations, by autocast"
    LAYERS = "all layers, on half-precision copies of the parameters"
    PARAMETERS = "parameters, gradients and the optimizer's state too"


@dataclass(frozen=True)
class MixedPrecision:
    """What is cast to which dtype, the loss scaler, and lines for the user.

    Everything is float32 if ``cast`` is None.
    """

    cast: Cast | None = None
    dtype: torch.dtype = torch.float32
    scaler: GradScaler | None = None
    note: str = "fp16: float32"
    warning: str | None = None

    def apply(self, model: nn.Module) -> nn.Module:
        """Cast parameters or layers of ``model`` in place; return it. Autocast needs neither.

        In bfloat16 on a CPU, convolutions get a hook for small images.
        """
        if self.dtype == torch.bfloat16 and not torch.cuda.is_available():
            for layer in model.modules():
                if isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros":
                    layer.register_forward_pre_hook(_pad_small_images)
        if self.cast is Cast.PARAMETERS:
            # In place: the optimizer, built before, keeps its parameters.
            model.to(self.dtype)
        if self.cast in (Cast.LAYERS, Cast.PARAMETERS):
            compute_in_half(model, self.dtype)
        return model

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the context to run the model in."""
        return torch.autocast(device.type, self.dtype, enabled=self.cast is Cast.OPERATIONS)


# The keys are modes, and the levels of NVIDIA's apex.amp (apex/amp/frontend.py).
CASTS = {
    AMP_TYPE.TORCH: Cast.OPERATIONS,
    AMP_TYPE.NAIVE: Cast.LAYERS,
    "O0": None,
    "O1": Cast.OPERATIONS,
    "O2": Cast.LAYERS,
    "O3": Cast.PARAMETERS,
}


def build_mixed_precision(fp16: Values | None, device_type: str) -> MixedPrecision:
    """Build the mixed precision of the config's ``fp16`` on a "cuda" or "cpu" device.

    - None, or no mode: full precision.
    - ``AMP_TYPE.TORCH``: autocast. Replaces legacy/amp/torch_amp, which asserts torch 1.x
      (_grad_scaler.py:130) and fails on CPUs.
    - ``AMP_TYPE.NAIVE``: layers in half precision, float32 master weights. Replaces
      legacy/amp/naive_amp, which needs a GPU (_fp16_optimizer.py:82) and clips before unscaling.
    - ``AMP_TYPE.APEX``: ``opt_level`` "O0" (full precision), "O1" (default; same as TORCH), "O2"
      (same as NAIVE), or "O3" (half precision throughout, no loss scaling). Replaces apex.amp,
      which NVIDIA has removed.

    ``dtype`` is 'float16' or 'bfloat16'; default: bfloat16 if the device supports it, else float16
    on GPUs, full precision on CPUs. Other keys are those of the loss scaler, which only float16
    uses.

    Raises:
        KeyError: for another mode, which the config's schema refuses before.
    """
    options = dict(fp16 or {})
    mode = options.pop("mode", None)
    if mode is None:
        return MixedPrecision()
    # What is left in `options` after these are the loss scaler's.
    opt_level = options.pop("opt_level", "O1") if mode == AMP_TYPE.APEX else None
    dtype = _parse_dtype(options.pop("dtype", None), device_type)
    cast = CASTS[opt_level or mode]
    name = f"fp16: {mode}"
    if opt_level:
        name += f" {opt_level}, by PyTorch instead of apex.amp,"
    if cast is None:
        return MixedPrecision(note=f"{name} in float32")
    if dtype == torch.float32:
        why = f"this CPU ({instruction_set()}) has no bfloat16 instructions"
        return MixedPrecision(note=f"{name} in float32: {why}")
    scaler = None
    # With O3 the gradients are in half precision, which GradScaler refuses to unscale.
    if dtype == torch.float16 and cast is not Cast.PARAMETERS and options.pop("enabled", True):
        scaler = GradScaler(device_type, **options)
    note = f"{name} in {name_dtype(dtype)}: {cast.value}"
    return MixedPrecision(cast, dtype, scaler, note, _warn_of_slowness(dtype, device_type))


def _warn_of_slowness(dtype: torch.dtype, device_type: str) -> str | None:
    """Return a warning if ``dtype`` was set explicitly on a CPU without instructions for it."""
    if device_type != "cpu" or is_fast(name_dtype(dtype)):
        return None
    return (
        f"warning: fp16.dtype={name_dtype(dtype)!r}: this CPU ({instruction_set()}) has no "
        "instructions for it; training can be hundreds of times slower than in float32. Omit "
        f"dtype to compute in {name_dtype(_parse_dtype(None, 'cpu'))}"
    )


def compute_dtype(fp16: Values | None, device_type: str) -> torch.dtype:
    """Return the dtype of matrix products under a valid ``fp16`` on "cuda" or "cpu"."""
    # "enabled" leaves out the loss scaler: it warns where there is no GPU.
    return build_mixed_precision({**(fp16 or {}), "enabled": False}, device_type).dtype


def name_dtype(dtype: torch.dtype | str) -> str:
    """Return the dtype's name in configs, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _parse_dtype(dtype: Any, device_type: str) -> torch.dtype:
    """Return ``dtype`` or its name as a dtype; for None the fastest that the device has."""
    if dtype is not None:
        # A config may say "float16", a script torch.float16.
        return getattr(torch, name_dtype(dtype))
    if device_type == "cpu":
        return torch.bfloat16 if is_fast("bfloat16") else torch.float32
    # GPUs before Ampere emulate bfloat16; a planner without a GPU plans for a recent one
    is_old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return torch.float16 if is_old else torch.bfloat16


def _pad_small_images(layer: nn.Conv2d, inputs: Any) -> None:
    """Have PyTorch pad images that are smaller than the kernel of a convolution on a CPU.

    Where oneDNN pads them itself in bfloat16, weights that meet nothing but padding get what was in
    memory before as their gradient, instead of 0 (torch 2.11 and 2.15).
    """
    is_small = min(inputs[0].shape[-2:]) < max(layer.kernel_size)
    # "constant" is zeros too, but padded before the convolution.
    layer.padding_mode = "constant" if is_small else "zeros"


def compute_in_half(model: nn.Module, dtype: torch.dtype) -> None:
    """Make every layer of ``model`` compute in ``dtype`` on casts of its float32 parameters.

    Upstream (legacy/amp/naive_amp/_fp16_optimizer.py) casts the model itself: its parameters are
    then not those of the optimizer, and gradients are accumulated over micro-batches in half
    precision.

    A ViT itself is such a layer, as it owns the class token and positions: it casts the images.
    Forward hooks run around the patched `forward`: under tensor parallelism the batch is cut before
    the cast, and logits are gathered in half precision.
    """
    for layer in model.modules():
        # Batch norms: half precision would round away the changes of their running statistics.
        if isinstance(layer, _NormBase):
            layer.forward = partial(_forward_in_own_type, layer, layer.forward, dtype)
            continue
        # A sharded linear layer casts its weights to its input's dtype itself.
        if layer._parameters and not isinstance(layer, ShardedLinear):
            layer.forward = partial(_forward_on_copies, layer, layer.forward, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a floating-point tensor, or those of a tuple."""
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _forward_in_own_type(
    layer: _NormBase, forward: Any, dtype: torch.dtype, inputs: Tensor
) -> Tensor:
    """Normalize in the dtype of a batch norm's parameters and running statistics.

    They must have the same dtype, and half-precision statistics would be too coarse.
    """
    tensors = (*layer.parameters(), *layer.buffers())
    # Without parameters and statistics a batch norm has no dtype of its own.
    own_dtype = tensors[0].dtype if tensors else torch.float32
    return forward(inputs.to(own_dtype)).to(dtype)


def _forward_on_copies(
    layer: nn.Module, forward: Any, dtype: torch.dtype, *inputs: Any, **named_inputs: Any
) -> Any:
    """Call ``forward`` on casts of a layer's parameters and buffers, and of its children's.

    A layer may use its children's itself, as timm's BEiT and torch's MultiheadAttention. The casts
    are made in each call, because checkpointed layers run again in the backward pass.
    """
    children = [one for one in layer.children() if not isinstance(one, (_NormBase, ShardedLinear))]
    tables: list[dict[str, Any]] = []
    for module in (layer, *children):
        tables += [module._parameters, module._buffers]
    # Layers read their parameters from these dicts: no layer needs to know of the casts.
    originals = [dict(table) for table in tables]
    for table in tables:
        table.update({name: _cast(value, dtype) for name, value in table.items()})
    try:
        return _cast(forward(*_cast(inputs, dtype), **named_inputs), dtype)
    finally:
        for table, original in zip(tables, originals, strict=True):
            # Also if `forward` raises: the optimizer needs its own parameters back.
            table.update(original)
