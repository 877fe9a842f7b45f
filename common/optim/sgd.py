"""torch's fused SGD, repaired."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD


def needs_unfused_sgd(tensor: Tensor) -> bool:
    """Return whether torch's fused kernel of SGD computes wrong numbers for ``tensor``.

    In half precision on CPUs it does before torch 2.14 (aten/src/ATen/native/cpu/
    FusedSGDKernel.cpp).
    """
    return tensor.is_cpu and tensor.itemsize < 4


class FusedSGD(SGD):
    """torch's fused SGD, whose momentum starts at 0 where the very first update is skipped.

    torch leaves there what was in the memory before: it takes an empty tensor, which only a kernel
    that is not skipped fills, and from the next update on counts it as momentum
    (torch/optim/sgd.py, `_fused_sgd`). It is not fused where a tensor `needs_unfused_sgd`.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, fused=True, **options)

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        starting = [p for p in trained if self.state.get(p, {}).get("momentum_buffer") is None]
        # Parameters that were frozen before start later than the others: torch's kernel takes a
        # momentum for all or none.
        if len(starting) < len(trained):
            for p in starting:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        if any(map(needs_unfused_sgd, trained)):
            self._step_unfused()
            return
        super().step()
        found_inf = getattr(self, "found_inf", None)
        for p in starting:
            momentum = self.state.get(p, {}).get("momentum_buffer")
            # Filled on the device, where `found_inf` is: the host does not wait.
            if momentum is not None and found_inf is not None:
                momentum.masked_fill_(found_inf.bool(), 0)

    def _step_unfused(self) -> None:
        # torch refuses `found_inf` if the optimizer is not fused.
        found_inf = vars(self).pop("found_inf", None)
        if found_inf is None or not found_inf:
            for group in self.param_groups:
                group["fused"] = False
            super().step()
            for group in self.param_groups:
                group["fused"] = True
        if found_inf is not None:
            self.found_inf = found_inf
