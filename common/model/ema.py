"""Exponential moving average (EMA) of the weights."""

from typing import Any

import torch
from torch import Tensor, nn

from common.colossal import BaseHook, Trainer, kept_buffers, named_shards


class EmaHook(BaseHook):
    """Average the weights over the optimizer steps, on the device, and evaluate with the averages.

    With ``warmup`` the decay at step t is ``min(decay, (1 + t) / (10 + t))``, as in TensorFlow's
    ExponentialMovingAverage, so that short runs do not end near their random initialisation.
    Without, it is 0 once and then ``decay``, as in timm. It depends only on the step, so resuming
    reproduces the averages. A skipped update leaves them unchanged too.

    Attributes:
        averages: of the trained parameters, and of batch norms' statistics, by name, float32; of a
        sharded model, this
            rank's shards.
    """

    def __init__(self, model: nn.Module, decay: float, warmup: bool = True) -> None:
        super().__init__(
            priority=5
        )  # before a checkpoint is saved, which also contains the weights
        self.decay, self.warmup = decay, warmup
        self.parameters: dict[str, Tensor] = {
            name: p for name, p in named_shards(model).items() if p.requires_grad
        }
        self.parameters |= {
            name: b for name, b in kept_buffers(model).items() if b.is_floating_point()
        }
        self.averages = {name: p.detach().float().clone() for name, p in self.parameters.items()}
        self._weights: list[Tensor] = []  # while the averages replace them

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        if trainer.update_done:
            step = trainer.step
            decay = min(self.decay, (1 + step) / (10 + step) if self.warmup else step - 1)
            weights = [p.detach().float() for p in self.parameters.values()]
            averages = list(self.averages.values())
            changes = torch._foreach_sub(weights, averages)
            torch._foreach_mul_(
                changes, (1 - decay) * trainer.engine.optimizer.grad_norm.isfinite()
            )
            torch._foreach_add_(averages, changes)

    def before_test(self, trainer: Trainer) -> None:
        self._weights = [p.detach().clone() for p in self.parameters.values()]
        self._set(list(self.averages.values()))

    def after_test(self, trainer: Trainer) -> None:
        self._set(self._weights)
        self._weights = []

    def after_train(self, trainer: Trainer) -> None:
        if self._weights:  # stopped in the middle of an evaluation
            self.after_test(trainer)

    def _set(self, values: list[Tensor]) -> None:
        torch._foreach_copy_([p.detach() for p in self.parameters.values()], values)
