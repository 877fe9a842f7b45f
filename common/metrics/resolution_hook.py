"""The hook of images and batches that change while training."""

from common.config.plan import Plan
from common.engine.compiler import count_graphs
from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook
from common.resolutions import Resolution, resolution_at
from common.text import counted, print_wrapped


class ResolutionHook(BaseHook):
    """Set how many micro-batches make a step of each epoch; say from where its sizes are new.

    Rank 0, where ``is_main``, says so after the first step, with the graphs compiled for it.
    """

    def __init__(self, plan: Plan, is_main: bool):
        super().__init__(priority=-1)  # before the hooks that count micro-batches
        self.resolutions = plan.resolutions
        self.has_batches = plan.has_batches
        self.is_main = is_main and len(plan.resolutions) > 1
        self.current: Resolution | None = None
        self.is_new = False
        self.graphs = 0

    def before_train(self, trainer: Trainer) -> None:
        trainer.resolutions = self.resolutions

    def before_train_epoch(self, trainer: Trainer) -> None:
        resolution = resolution_at(self.resolutions, trainer.cur_epoch)
        trainer.engine.optimizer.accumulation = resolution.accumulation
        self.is_new = resolution != self.current
        self.current = resolution
        self.graphs = count_graphs()

    def after_train_iter(self, trainer: Trainer, *_: object) -> None:
        if not (trainer.update_done and self.is_new and self.current):
            return
        self.is_new = False
        if self.is_main:
            size = self.current.image_size
            batch = f"batches of {self.current.total_batch:,}, " if self.has_batches else ""
            graphs = count_graphs() - self.graphs
            compiled = f", {counted(graphs, 'graph')} compiled" if graphs else ""
            print_wrapped(
                f"from step {trainer.step:,}: {batch}{size} x {size} pixels in micro-batches of "
                f"{self.current.micro_batch}{compiled}"
            )
