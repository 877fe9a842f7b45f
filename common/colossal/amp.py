"""Mixed precision: what the config's ``fp16 = dict(mode=AMP_TYPE.TORCH, ...)`` means here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from common.colossal.upstream import AMP_TYPE
from common.errors import UserError, did_you_mean

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SCALER_OPTIONS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")


class AgreedGradScaler(torch.amp.GradScaler):
    """Loss scaler whose ranks skip an update together, also when only one shard of the gradient has overflowed."""

    def _unscale_grads_(self, optimizer: Optimizer, *args: Any) -> dict[torch.device, Tensor]:
        found_inf_per_device = super()._unscale_grads_(optimizer, *args)
        if dist.is_initialized() and dist.get_world_size() > 1:
            for found_inf in found_inf_per_device.values():
                dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return found_inf_per_device


@dataclass(frozen=True)
class MixedPrecision:
    """The type that the forward pass computes in (None: as the weights are), and the loss scaler that it needs."""

    dtype: torch.dtype | None = None
    scaler: AgreedGradScaler | None = None


def build_mixed_precision(fp16: Mapping[str, Any] | None, device_type: str) -> MixedPrecision:
    """Return what the config's ``fp16`` asks for on a "cuda" or "cpu" device; without it or its mode, full precision.

    ``dtype`` is 'float16' or 'bfloat16', by default float16 on GPUs and bfloat16 on CPUs. float16 needs a loss scaler,
    which takes ``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval`` and ``enabled`` as torch's
    does; bfloat16 has the range of float32 and leaves them unused. Replaces legacy/amp/torch_amp, which asserts torch
    1.x (_grad_scaler.py:130) and cannot compute on a CPU. Raises `UserError` for other modes, types and keys.
    """
    options = dict(fp16 or {})
    mode = options.pop("mode", None)
    if mode is None:
        return MixedPrecision()
    _check_mode(mode)
    dtype = options.pop("dtype", None) or ("float16" if device_type == "cuda" else "bfloat16")
    dtype = DTYPES.get(dtype, dtype)
    if dtype not in DTYPES.values():
        raise UserError(f"fp16.dtype={dtype!r}: write 'float16' or 'bfloat16'")
    for name in options:
        if name not in SCALER_OPTIONS:
            raise UserError(f"fp16.{name} is not an option of AMP_TYPE.TORCH{did_you_mean(name, SCALER_OPTIONS)}")
    return MixedPrecision(dtype, AgreedGradScaler(device_type, **options) if dtype == torch.float16 else None)


def _check_mode(mode: object) -> None:
    if isinstance(mode, str):
        raise UserError(f"fp16.mode={mode!r} is a string: write AMP_TYPE.TORCH (from colossalai.amp import AMP_TYPE)")
    if mode != AMP_TYPE.TORCH:
        raise UserError(f"fp16.mode={mode} is not supported: write AMP_TYPE.TORCH")
