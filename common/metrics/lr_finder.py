"""The learning-rate range test (L. N. Smith, arXiv 1506.01186)."""

import math
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common.colossal import BaseHook, ParallelMode, Trainer, gpc
from common.files import short_path
from common.plot import build_figure, place_legend, save_figure
from common.table import write_csv

LOWEST, HIGHEST = 1e-5, 10.0
STEPS = 120  # 20 for each factor of ten
SMOOTHING = 0.9  # weight of the previous average
DIVERGED = 4.0  # times the lowest smoothed loss
MARGIN = 10.0
SIGNIFICANT = 1.3  # standard deviations by which the loss must fall; noise alone does in 3 % of tests


class LearningRateFinder(BaseHook):
    """Take ``steps`` optimizer steps at rates from `LOWEST` to `HIGHEST`, evenly spaced on a logarithmic scale.

    Then ends the training without evaluation; earlier if the smoothed loss is not finite or exceeds `DIVERGED` times
    its minimum. Rank 0 writes find_lr.csv and find_lr.png to ``folder`` and prints the suggested rate.
    """

    def __init__(self, folder: Path, steps: int, is_main: bool):
        super().__init__(priority=0)
        self.folder, self.total_steps, self.is_main = folder, steps, is_main
        self.rows: list[dict[str, float]] = []

    def before_train(self, trainer: Trainer) -> None:
        trainer.engine.lr_scheduler = None
        rates = [group["lr"] for group in trainer.engine.optimizer.param_groups]
        self.factors = [rate / max(rates) for rate in rates]  # of layer decay
        self.loss = torch.zeros((), dtype=torch.float64, device=trainer.device)
        self.average = 0.0
        self._set_rate(trainer)

    def _set_rate(self, trainer: Trainer) -> None:
        share = len(self.rows) / max(self.total_steps - 1, 1)
        for group, factor in zip(trainer.engine.optimizer.param_groups, self.factors, strict=True):
            group["lr"] = factor * LOWEST * (HIGHEST / LOWEST) ** share

    def after_train_iter(self, trainer: Trainer, output: None, label: None, loss: Tensor) -> None:
        self.loss += loss.detach() / trainer.engine.optimizer.accumulation
        if not trainer.update_done:
            return
        loss_of_step = _mean_over_ranks(self.loss)
        self.loss.zero_()
        self.average = SMOOTHING * self.average + (1 - SMOOTHING) * loss_of_step
        smoothed = self.average / (1 - SMOOTHING ** (len(self.rows) + 1))
        self.rows.append({"learning_rate": trainer.learning_rate, "loss": loss_of_step, "smoothed": smoothed})
        least = min(row["smoothed"] for row in self.rows)
        trainer.stopping = len(self.rows) == self.total_steps or not smoothed < DIVERGED * least
        trainer.evaluated_step = trainer.step  # none is due where an epoch ends
        self._set_rate(trainer)

    def after_train(self, trainer: Trainer) -> None:
        if not self.is_main:
            return
        suggested, shown = suggest_rate(self.rows), short_path(self.folder)
        write_csv(self.rows, self.folder / "find_lr.csv")
        _draw(self.rows, suggested, self.folder / "find_lr.png")
        print(f"curve        {shown}/find_lr.png\n             {shown}/find_lr.csv")
        if not math.isfinite(self.rows[0]["loss"]):
            print(f"no suggestion: the loss of the first step is {self.rows[0]['loss']}", flush=True)
        elif suggested is None:
            print("no suggestion: the loss does not fall by more than its noise")
            print("take more steps (--find-lr 500) or a larger TOTAL_BATCH_SIZE", flush=True)
        else:
            print(f"suggested    a tenth of {suggested * MARGIN:.1e}, where the smoothed loss is lowest")
            print(f"LEARNING_RATE={suggested:.1e}", flush=True)


def suggest_rate(rows: list[dict[str, float]]) -> float | None:
    """Return the rate with the lowest smoothed loss, divided by `MARGIN`; None if the loss falls by noise only.

    The first tenth of the losses (at least five), at rates too low to change them, gives the initial loss and its
    standard deviation.
    """
    first = [row["loss"] for row in rows[: max(5, len(rows) // 10)] if math.isfinite(row["loss"])]
    finite = [row for row in rows[len(rows) // 10 :] if math.isfinite(row["smoothed"])]
    if len(first) < 2 or not finite:
        return None
    best = min(finite, key=lambda row: row["smoothed"])
    falls = statistics.fmean(first) - best["smoothed"] > SIGNIFICANT * statistics.stdev(first)
    return best["learning_rate"] / MARGIN if falls else None


def _mean_over_ranks(loss: Tensor) -> float:
    """Return the mean loss, equal on all ranks, so that they stop together."""
    world_size = gpc.get_world_size(ParallelMode.GLOBAL)
    if world_size > 1:
        loss = loss.clone()
        dist.all_reduce(loss, group=gpc.get_group(ParallelMode.GLOBAL))
    return loss.item() / world_size


def _draw(rows: list[dict[str, float]], best: float | None, path: Path) -> None:
    figure, axes = build_figure(8, 5)
    rates = [row["learning_rate"] for row in rows]
    axes.plot(rates, [row["loss"] for row in rows], ".", color="0.7", label="loss of a step")
    axes.plot(rates, [row["smoothed"] for row in rows], label="smoothed")
    if best:
        axes.axvline(best, color="tab:red", linestyle="--", label=f"suggested: {best:.1e}")
    bottom, top = min(row["smoothed"] for row in rows), rows[0]["smoothed"]
    if math.isfinite(top):
        margin = 0.5 * (top - bottom) or 0.5  # the loss may never fall below the first
        axes.set_ylim(bottom - margin, top + margin)  # leave out the diverged end
    axes.set(xscale="log", xlabel="learning rate", ylabel="training loss (cross-entropy)")
    place_legend(axes)
    save_figure(figure, path)
