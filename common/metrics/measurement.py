"""What a run does in place of training, with ``--find-lr``, ``--find-batch`` or ``--profile``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config.plan import Plan
from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook
from common.metrics.loggers import ProgressBar


class Measurement(BaseHook):
    """Take ``total_steps`` steps without evaluation; rank 0 writes to ``folder``."""

    writes = ""
    plain = ""  # the flag of a measurement that needs steps without CUDA graphs
    phase = 0  # whose size all images have: losses and times of several are not comparable

    def __init__(self, folder: Path, total_steps: int, is_main: bool):
        super().__init__(priority=0)
        self.folder = folder
        self.total_steps = total_steps
        self.is_main = is_main
        self.rows: list[dict[str, float]] = []  # of the table that it writes
        self.announcement = (
            f"{total_steps} steps instead of training; nothing is saved but {self.writes} in "
            f"{folder}"
        )

    def limit(self, plan: Plan) -> Plan:
        """Return ``plan``, of the training, with these steps, in as many epochs as they need."""
        self.plan = plan
        steps = self.total_steps
        return replace(
            plan,
            epochs=steps,
            last_step=steps,
            total_steps=max(steps, plan.total_steps),
            resolutions=[replace(plan.resolutions[self.phase], end=steps)],
        )

    def before_train(self, trainer: Trainer) -> None:
        if self.plain:
            trainer.engine.train_without_graphs(self.plain)
        if self.is_main:
            self.bar = ProgressBar(self.folder, 0, self.total_steps)

    def after_train_iter(self, trainer: Trainer, *result: Any) -> None:
        # No evaluation is then due at the end of an epoch.
        trainer.evaluated_step = trainer.step
        if self.is_main and trainer.update_done:
            self.bar.step()

    def after_train(self, trainer: Trainer) -> None:
        self.close()

    def close(self) -> None:
        """Close the progress bar; also where the training has failed."""
        if hasattr(self, "bar"):
            self.bar.close()
