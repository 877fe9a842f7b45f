"""How large a batch pays, by the gradient noise scale of the first steps: ``--find-batch``."""

import math
from pathlib import Path
from typing import Any

from common.config.plan import Plan
from common.engine.trainer import Trainer
from common.files import short_path, write_csv
from common.metrics.measurement import Measurement
from common.text import format_table, print_wrapped, two_digits

STEPS = 300
BATCHES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class BatchFinder(Measurement):
    """Take the first steps of a training, and measure the noise scale in each.

    Rank 0 writes find_batch.csv, and prints the noise scale after the last step with what it means
    for the training's batch: training to a loss takes S (1 + noise scale / B) steps of B images
    (McCandlish et al., arXiv 1812.06162, equation 2.7).
    """

    writes = "find_batch.csv"

    def __init__(self, folder: Path, total_steps: int, is_main: bool, plan: Plan):
        super().__init__(folder, total_steps, is_main)
        self.plan = plan  # of the training that the config describes, not of this measurement
        self.rows: list[dict[str, float]] = []

    def after_train_iter(self, trainer: Trainer, *result: Any) -> None:
        # No evaluation is then due at the end of an epoch.
        trainer.evaluated_step = trainer.step
        if trainer.update_done:
            noise_scale: Any = trainer.engine.noise_scale
            value = noise_scale.value().item()
            self.rows.append({"step": trainer.step, "noise_scale": value})

    def after_train(self, trainer: Trainer) -> None:
        if not self.is_main or not self.rows:
            return
        write_csv(self.rows, self.folder / "find_batch.csv")
        print(f"noise scale  {short_path(self.folder)}/find_batch.csv")
        scales = [row["noise_scale"] for row in self.rows]
        # The first estimates average few steps.
        last_third = scales[-math.ceil(len(scales) / 3) :]
        critical = scales[-1]
        if not all(0 < scale < math.inf for scale in last_third):
            print_wrapped(
                "no critical batch: the estimate of the true gradient is not above its noise; take "
                f"more steps (--find-batch {10 * STEPS}) or a larger TOTAL_BATCH_SIZE"
            )
            return
        low = min(last_third) / critical
        high = max(last_third) / critical
        print_wrapped(
            f"critical batch about {two_digits(critical)} images at step {len(scales)} ({low:.1f}x "
            f"to {high:.1f}x over the last third); it usually grows during training"
        )
        plan = self.plan
        print_wrapped(
            f"steps and images to the loss of {plan.total_steps:,} steps of {plan.total_batch:,} "
            "images, if it stayed there (docs/large-batches.md):"
        )
        print(format_table(compare_batches(critical, plan.total_batch, plan.total_steps)))


def compare_batches(critical: float, batch: int, steps: int) -> list[dict[str, str]]:
    """Return a row for each of `BATCHES` and ``batch``: steps and images to one loss.

    ``batch`` takes ``steps``; ``critical`` is the noise scale.
    """
    # This is S of equation 2.7: the steps that an unlimited batch would take.
    fewest = steps / (1 + critical / batch)
    rows = []
    for size in sorted({*BATCHES, batch}):
        needed = fewest * (1 + critical / size)
        rows.append(
            {
                "batch": f"{size:,}",
                "steps": f"{needed:,.0f}",
                "images": f"{needed * size:,.0f}",
                "steps, x": f"{needed / steps:.2f}",
                "images, x": f"{needed * size / (steps * batch):.2f}",
            }
        )
    return rows
