"""From the gradients of micro-batches to one update of the weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from common.colossal.grad_scaler import AgreedGradScaler
from common.colossal.tensor_parallel.gradients import global_grad_norm, sum_partial_gradients
from common.colossal.upstream import OptimizerWrapper


class StepOptimizer(OptimizerWrapper):
    """Accumulate gradients over ``accumulation`` micro-batches; then unscale, measure and clip them, and update once.

    Of a sharded model, partial gradients are first added up, and measured as the whole model's.

    `Engine` calls `zero_grad`, `backward`, `clip_grad_by_norm` and `step` for every micro-batch; all but `backward` act
    once per optimiser step. Afterwards ``grad_norm`` is the norm of the step's gradient before clipping: a 0-dim tensor
    on the device, read without waiting for it.

    It stands for three wrappers of upstream's, which

    - multiply every gradient by 0 when no clipping is asked for (interface/optimizer.py:123),
    - clip the partial sums of each micro-batch (legacy/engine/gradient_accumulation/_gradient_accumulation.py:65
      defines ``clip_grad_norm``, but the engine calls ``clip_grad_by_norm``), and
    - clip before unscaling (legacy/amp/torch_amp/torch_amp.py:51, the same slip).
    """

    def __init__(self, optim: Optimizer, accumulation: int = 1, scaler: AgreedGradScaler | None = None):
        super().__init__(optim)
        self.accumulation, self.scaler = accumulation, scaler
        self.accumulated = 0
        self.grad_norm: Tensor | None = None

    @property
    def completes_step(self) -> bool:
        """Whether the next micro-batch is the last of its step."""
        return self.accumulated + 1 == self.accumulation

    def zero_grad(self, *args: object, **kwargs: object) -> None:
        if self.accumulated == 0:
            self.optim.zero_grad(*args, **kwargs)

    def backward(self, loss: Tensor, **kwargs: object) -> None:
        loss = loss / self.accumulation
        super().backward(self.scaler.scale(loss) if self.scaler else loss, **kwargs)
        self.accumulated += 1

    def clip_grad_by_norm(self, max_norm: float) -> None:
        """Set ``grad_norm``, and scale the gradient down to ``max_norm`` if that is above 0."""
        if self.accumulated < self.accumulation:
            return
        sum_partial_gradients(self.parameters)
        if self.scaler:
            self.scaler.unscale_(self.optim)
        self.grad_norm = global_grad_norm(self.parameters)
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, max_norm, self.grad_norm)

    def step(self, *args: object, **kwargs: object) -> None:
        if self.accumulated < self.accumulation:
            return
        self.accumulated = 0
        if self.scaler is None:
            self.optim.step(*args, **kwargs)
            return
        self.scaler.step(self.optim, *args, **kwargs)
        self.scaler.update()
        # A schedule counts skipped updates too; without this torch warns when the very first one is skipped.
        self.optim._opt_called = True

    def step_state(self) -> dict[str, Any]:
        """Return the loss scaler's state; the optimiser's own is not in it."""
        return {"scaler": self.scaler.state_dict() if self.scaler else None}

    def load_step_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the scale of a run of the same mixed precision; another keeps its own."""
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
