"""Exponential moving average (EMA) of the weights."""

from typing import Any

import torch
from torch import Tensor, nn

from common.engine.tensor_parallel.sharding import named_shards, persistent_buffers
from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook


class EmaHook(BaseHook):
    """Average the weights over the optimizer steps, on the device, and evaluate with the averages.

    With ``warmup`` the decay at step t is ``min(decay, (1 + t) / (10 + t))``, as in TensorFlow's
    ExponentialMovingAverage, so that short runs do not end near their random initialisation.
    Without, it is 0 once and then ``decay``, as in timm. It depends only on the step, so resuming
    reproduces the averages. A skipped update leaves them unchanged too.

    Attributes:
        averages: by name, float32, those of the trained parameters and of batch norms' statistics;
            of a sharded model, this rank's shards.
    """

    def __init__(self, model: nn.Module, decay: float, warmup: bool = True):
        # Before `CheckpointHook` (10): a checkpoint holds weights and averages of the same step.
        super().__init__(priority=5)
        self.decay = decay
        self.warmup = warmup
        self.averaged: dict[str, Tensor] = {}
        for name, parameter in named_shards(model).items():
            if parameter.requires_grad:
                self.averaged[name] = parameter
        for name, buffer in persistent_buffers(model).items():
            if buffer.is_floating_point():
                self.averaged[name] = buffer
        self.averages = {name: p.detach().float().clone() for name, p in self.averaged.items()}
        self._weights: list[Tensor] = []  # while the averages replace them

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.update_done:
            return
        step = trainer.step
        # Without a warm-up the limit is 0 in step 1: the averages begin at its weights.
        limit = (1 + step) / (10 + step) if self.warmup else step - 1
        decay = min(self.decay, limit)
        # 0 if the update was skipped. On the device: the host does not wait for it.
        is_applied = trainer.engine.optimizer.grad_norm.isfinite()
        weights = [p.detach().float() for p in self.averaged.values()]
        averages = list(self.averages.values())
        changes = torch._foreach_sub(weights, averages)
        # A NaN would stay NaN times 0: a skipped update leaves finite weights behind.
        factor = (1 - decay) * is_applied
        torch._foreach_mul_(changes, factor)
        torch._foreach_add_(averages, changes)

    def before_test(self, trainer: Trainer) -> None:
        self._weights = [p.detach().clone() for p in self.averaged.values()]
        self._set(list(self.averages.values()))

    def after_test(self, trainer: Trainer) -> None:
        self._set(self._weights)
        self._weights = []

    def after_train(self, trainer: Trainer) -> None:
        # They are set if the run was stopped in the middle of an evaluation.
        if self._weights:
            self.after_test(trainer)

    def _set(self, values: list[Tensor]) -> None:
        weights = [p.detach() for p in self.averaged.values()]
        torch._foreach_copy_(weights, values)
