"""What a run does in place of training, with ``--find-lr``, ``--find-batch`` or ``--profile``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook
from common.metrics.loggers import ProgressBar


@dataclass(eq=False)
class Measurement(BaseHook):
    """Take ``total_steps`` steps without evaluation; rank 0 writes to ``folder``."""

    writes = ""

    folder: Path
    total_steps: int
    is_main: bool

    def __post_init__(self):
        super().__init__(priority=0)
        self.announcement = (
            f"{self.total_steps} steps instead of training; nothing is saved but {self.writes} in "
            f"{self.folder}"
        )

    def before_train(self, trainer: Trainer) -> None:
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
