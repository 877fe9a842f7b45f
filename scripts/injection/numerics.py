"""Losses and gradients that are not finite."""

import functools
import random
from typing import Any

from injection.bench import ONE, TENSOR_PARALLEL, TWO, Bench, Fault, Mode, Recovery, choose_rank, result
from injection.processes import expect
from injection.victims import Place, add_hook, at, kill, on
from torch import Tensor

from common.checkpoint import find_fault, load_model_state, newest_checkpoint
from common.colossal import BaseHook, Trainer
from common.writers import read_metrics

LIMIT = 3


class Spoil(BaseHook):
    """Make the loss of the steps ``steps`` NaN, or a gradient in the middle of their accumulation infinite."""

    def __init__(self, what: str, steps: range) -> None:
        super().__init__(priority=5)
        self.what, self.steps = what, steps

    def before_train(self, trainer: Trainer) -> None:
        if self.what == "loss":
            trainer.engine.model.register_forward_hook(lambda *_: self._spoil_output(trainer, _[-1]))

    def _spoil_output(self, trainer: Trainer, output: Tensor) -> Tensor:
        return output * float("nan") if trainer.engine.model.training and trainer.step + 1 in self.steps else output

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        if self.what == "gradient" and not trainer.update_done and trainer.step + 1 in self.steps:
            next(p for p in trainer.engine.model.parameters() if p.grad is not None).grad[0] = float("inf")
