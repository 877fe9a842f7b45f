"""How large a batch pays, by the gradient noise scale of the first steps: ``--find-batch``."""

import math
from collections.abc import Sequence
from statistics import linear_regression
from typing import Any

from common.config.plan import Plan
from common.engine.trainer import Trainer
from common.files import short_path, write_csv
from common.metrics.measurement import Measurement
from common.text import format_table, print_wrapped, two_digits

STEPS = 300
HALVINGS = 4  # of the plan's batch, to the smallest that is proposed
BATCHES = [2**power for power in range(4, 16)]  # 16 to 32,768


class BatchFinder(Measurement):
    """Take the first steps of a training, and measure the noise scale in each.

    Rank 0 writes find_batch.csv, and prints the noise scale after the last step with what it means
    for the training's batch: training to a loss takes S (1 + noise scale / B) steps of B images
    (McCandlish et al., arXiv 1812.06162, equation 2.7).
    """

    writes = "find_batch.csv"
    plain = "--find-batch"
    phase = -1

    def after_train_iter(self, trainer: Trainer, *result: Any) -> None:
        super().after_train_iter(trainer)
        if trainer.update_done:
            noise_scale: Any = trainer.engine.noise_scale
            # It waits for the GPU in every step: this run does not measure speed.
            value = noise_scale.value().item()
            self.rows.append({"step": trainer.step, "noise_scale": value})

    def after_train(self, trainer: Trainer) -> None:
        super().after_train(trainer)
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
            f"critical batch (the noise scale) about {two_digits(critical)} images at step "
            f"{len(scales)} ({low:.1f}x to {high:.1f}x over the last third); it falls in the first "
            "steps, and usually grows later"
        )
        plan = self.plan
        print_wrapped(
            f"steps and images to the loss of {plan.total_steps:,} steps of {plan.total_batch:,} "
            "images, if it stayed there (docs/noise-scale.md):"
        )
        print(format_table(compare_batches(critical, plan)))
        power = measure_growth(scales)
        print_wrapped(
            f"a batch that follows the noise scale, if that grows on as the power {power:.2f} of "
            "the step, as in the last two thirds:"
        )
        # Not wrapped: a user copies it.
        print(f"BATCH_SIZES={propose_batches(scales, plan)}")


def measure_growth(scales: Sequence[float]) -> float:
    """Return the power of the step by which the noise scale grew in the last two thirds of steps.

    It is from 0 to 1: a run that measures a fall is too short to say more.
    """
    first = len(scales) // 3
    points = [(step, scale) for step, scale in enumerate(scales, 1) if step > first]
    steps, values = zip(*points, strict=True)
    if not all(0 < value < math.inf for value in values):
        return 0.0
    slope, _ = linear_regression([*map(math.log, steps)], [*map(math.log, values)])
    return min(max(slope, 0.0), 1.0)


def propose_batches(scales: Sequence[float], plan: Plan) -> list[tuple[int, int]]:
    """Return BATCH_SIZES, each epoch's the plan's batch halved until the noise scale is as large.

    In the measured steps that is the least of the last third.
    """
    choices = [plan.total_batch]
    while choices[0] % (2 * plan.data_parallel) == 0 and len(choices) <= HALVINGS:
        choices.insert(0, choices[0] // 2)
    power = measure_growth(scales)
    least = min(scales[-math.ceil(len(scales) / 3) :])
    phases: list[tuple[int, int]] = []
    for epoch in range(plan.epochs):
        steps = epoch * plan.steps_per_epoch
        scale = least
        if steps >= len(scales):
            scale = max(least, scales[-1] * (steps / len(scales)) ** power)
        batch = max([choices[0], *(choice for choice in choices if choice <= scale)])
        if batch == plan.total_batch:
            break
        if phases and phases[-1][1] == batch:
            phases[-1] = phases[-1][0] + 1, batch
        else:
            phases.append((1, batch))
    return phases


def compare_batches(critical: float, plan: Plan) -> list[dict[str, str]]:
    """Return a row for the plan's batch and each of `BATCHES` up to an epoch: steps and images.

    They are those to the loss after the plan's ``total_steps``; ``critical`` is the noise scale.
    """
    batch = plan.total_batch
    # This is S of equation 2.7: the steps that an unlimited batch would take.
    fewest = plan.total_steps / (1 + critical / batch)
    epoch = batch * plan.steps_per_epoch
    rows = []
    for size in sorted({batch, *(size for size in BATCHES if size <= epoch)}):
        needed = fewest * (1 + critical / size)
        rows.append(
            {
                "batch": f"{size:,}",
                "steps": f"{needed:,.0f}",
                "images": f"{needed * size:,.0f}",
                "steps, x": f"{needed / plan.total_steps:.2f}",
                "images, x": f"{needed * size / (plan.total_steps * batch):.2f}",
            }
        )
    return rows
