"""The loss scaler of float16, agreed between ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from common.errors import UserError

CHECK_EVERY = 20  # updates; reading the scale waits for the device
# A loss that is finite overflows at most until its scale has come down to about 1. One that is not halves the scale in
# every update: from torch's 2^16 in 30 updates to this.
LEAST_SCALE = 2.0**-14


class AgreedGradScaler(torch.amp.GradScaler):
    """Loss scaler whose ranks skip an update together, also when only one shard of the gradient has overflowed.

    As the scale follows from which updates were skipped, it is then equal on all ranks. Raises `UserError` from
    `update` when it has collapsed below `LEAST_SCALE`, which only updates that overflow without end can do.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._updates = 0

    def _unscale_grads_(self, optimizer: Optimizer, *args: Any) -> dict[torch.device, Tensor]:
        found_inf_per_device = super()._unscale_grads_(optimizer, *args)
        if dist.is_initialized() and dist.get_world_size() > 1:
            for found_inf in found_inf_per_device.values():
                dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return found_inf_per_device

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale)
        self._updates += 1
        if self._updates % CHECK_EVERY == 0 and self.is_enabled() and self.get_scale() < LEAST_SCALE:
            raise UserError(
                f"the loss scale of float16 has collapsed to {self.get_scale():.1e}, because every update overflows: "
                "lower LEARNING_RATE, set clip_grad_norm, or use fp16.dtype='bfloat16'"
            )
