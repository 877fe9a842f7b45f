"""A hook of the training loop that says what it is doing."""

from typing import Any

from torch import nn

from common.colossal.heartbeat import doing
from common.colossal.trainer import Trainer
from common.colossal.upstream import BaseHook


class HeartbeatHook(BaseHook):
    """Say in which step the trainer is, and whether it waits for data, computes or evaluates."""

    def __init__(self) -> None:
        super().__init__(priority=0)
        self.phase = "starting"

    def before_train(self, trainer: Trainer) -> None:
        # no hook lies between waiting for a batch and the forward pass
        trainer.engine.model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        doing(f"{self.phase}: forward and backward" if model.training else f"{self.phase}: forward")

    def before_train_iter(self, trainer: Trainer) -> None:
        self.phase = f"step {trainer.step + 1}"
        doing(f"{self.phase}: waiting for data")

    def after_train_iter(self, trainer: Trainer, *result: Any) -> None:
        doing(f"{self.phase}: hooks after it")

    def before_test(self, trainer: Trainer) -> None:
        self.phase = f"evaluating after step {trainer.step}"

    def before_test_iter(self, trainer: Trainer) -> None:
        doing(f"{self.phase}: waiting for data")

    def after_test_epoch(self, trainer: Trainer) -> None:
        doing(f"{self.phase}: adding up")

    def after_train(self, trainer: Trainer) -> None:
        doing("ending")
