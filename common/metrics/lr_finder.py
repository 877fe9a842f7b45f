"""The learning-rate range test of L. N. Smith (arXiv 1506.01186): ``--find-lr``."""

import math
import statistics
from pathlib import Path

import torch
from torch import Tensor

from common.engine.trainer import Trainer
from common.engine.upstream import ParallelMode, all_reduce, gpc
from common.files import short_path, write_csv
from common.metrics.measurement import Measurement
from common.metrics.plot import build_figure, place_legend, save_figure

STEPS = 120  # 20 for each factor of ten between the rates
LOWEST = 1e-5
HIGHEST = 10.0
SMOOTHING = 0.9  # weight of the previous average
DIVERGED = 4.0  # times the lowest smoothed loss
SAFETY = 10.0  # divides the rate with the lowest loss
# Standard deviations by which the loss must fall. Noise alone falls so far in 3 % of tests.
SIGNIFICANT = 1.3


class LearningRateFinder(Measurement):
    """Take steps at rates from `LOWEST` to `HIGHEST`, evenly spaced on a logarithmic scale.

    Ends earlier if the smoothed loss is not finite or exceeds `DIVERGED` times its minimum. Rank 0
    writes find_lr.csv and find_lr.png and prints the suggested rate.
    """

    writes = (
        f"find_lr.png and find_lr.csv, of learning rates from {LOWEST:g} to {HIGHEST:g} in place "
        "of the config's,"
    )

    def before_train(self, trainer: Trainer) -> None:
        super().before_train(trainer)
        # The test sets the rates itself.
        trainer.engine.lr_scheduler = None
        # the groups' rates differ by layer decay; "lr" may be a warm-up's
        groups = trainer.engine.optimizer.param_groups
        rates = [group.get("initial_lr", group["lr"]) for group in groups]
        self.factors = [rate / max(rates) for rate in rates]
        self.loss = torch.zeros((), dtype=torch.float64, device=trainer.device)
        self.average = 0.0
        self._set_rate(trainer)

    def _set_rate(self, trainer: Trainer) -> None:
        """Set the rate of the next step."""
        share = len(self.rows) / max(self.total_steps - 1, 1)
        for group, factor in zip(trainer.engine.optimizer.param_groups, self.factors, strict=True):
            group["lr"] = factor * LOWEST * (HIGHEST / LOWEST) ** share

    def after_train_iter(self, trainer: Trainer, output: None, label: None, loss: Tensor) -> None:
        super().after_train_iter(trainer)
        self.loss += loss.detach() / trainer.engine.optimizer.accumulation
        if not trainer.update_done:
            return
        # Summed over the ranks: with an equal loss all stop together.
        total = all_reduce(self.loss, ParallelMode.GLOBAL).item()
        loss_of_step = total / gpc.get_world_size(ParallelMode.GLOBAL)
        self.loss = torch.zeros_like(self.loss)
        self.average = SMOOTHING * self.average + (1 - SMOOTHING) * loss_of_step
        # The average starts at 0. As in Adam, this corrects for it.
        smoothed = self.average / (1 - SMOOTHING ** (len(self.rows) + 1))
        self.rows.append(
            {"learning_rate": trainer.learning_rate, "loss": loss_of_step, "smoothed": smoothed}
        )
        least = min(row["smoothed"] for row in self.rows)
        trainer.stopping |= not smoothed < DIVERGED * least  # `not <` holds for NaN too
        self._set_rate(trainer)

    def after_train(self, trainer: Trainer) -> None:
        super().after_train(trainer)
        if not self.is_main:
            return
        suggested = suggest_rate(self.rows)
        shown = short_path(self.folder)
        write_csv(self.rows, self.folder / "find_lr.csv")
        _draw(self.rows, suggested, self.folder / "find_lr.png")
        print(f"curve        {shown}/find_lr.png\n             {shown}/find_lr.csv")
        if suggested is None:
            print("no suggestion: the loss is not finite, or does not fall by more than its noise")
            print("take more steps (--find-lr 500) or a larger TOTAL_BATCH_SIZE", flush=True)
        else:
            lowest = f"{suggested * SAFETY:.1e}, where the smoothed loss is lowest"
            print(f"suggested    a tenth of {lowest}")
            print(f"LEARNING_RATE={suggested:.1e}", flush=True)


def suggest_rate(rows: list[dict[str, float]]) -> float | None:
    """Return the rate with the lowest smoothed loss, divided by `SAFETY`, or None.

    It is None if the loss falls by no more than its noise. The first tenth of the losses (at least
    five), at rates too low to change them, gives the initial loss and its standard deviation.
    """
    tenth = len(rows) // 10
    first = [row["loss"] for row in rows[: max(5, tenth)] if math.isfinite(row["loss"])]
    finite = [row for row in rows[tenth:] if math.isfinite(row["smoothed"])]
    if len(first) < 2 or not finite:
        return None
    best = min(finite, key=lambda row: row["smoothed"])
    falls = statistics.fmean(first) - best["smoothed"] > SIGNIFICANT * statistics.stdev(first)
    return best["learning_rate"] / SAFETY if falls else None


def _draw(rows: list[dict[str, float]], best: float | None, path: Path) -> None:
    """Plot the losses over the rates, and the suggested one."""
    figure, axes = build_figure(8, 5)
    rates = [row["learning_rate"] for row in rows]
    axes.plot(rates, [row["loss"] for row in rows], ".", color="0.7", label="loss of a step")
    axes.plot(rates, [row["smoothed"] for row in rows], label="smoothed")
    if best:
        axes.axvline(best, color="tab:red", linestyle="--", label=f"suggested: {best:.1e}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="training loss")
    place_legend(axes, columns=3)
    save_figure(figure, path)
