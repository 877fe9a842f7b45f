"""Schedules of the learning rate: a linear warm-up, then a decay.

A schedule is a function of the optimizer step, counted from 0, and of the numbers of all and of
warm-up steps. It returns a fraction of the peak.
"""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Schedule = Callable[[int, int, int], float]


def linear(step: int, total_steps: int, warmup_steps: int) -> float:
    """Return Colossal-AI's LinearWarmupLR: 1 / (W + 1) at first, 1 at step W of T, 1 / (T - W) at
    the last.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return 1 - _progress(step, total_steps, warmup_steps)


def cosine(step: int, total_steps: int, warmup_steps: int) -> float:
    """Return Colossal-AI's CosineAnnealingWarmupLR without its overshoot of the peak, which
    `upstream` repairs.

    It is 1 / W at first, 1 at step W of T, (1 + cos(pi (T - W - 1) / (T - W))) / 2 at the last.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * _progress(step, total_steps, warmup_steps)))


def timm(step: int, total_steps: int, warmup_steps: int) -> float:
    """Return timm's CosineLRScheduler without `warmup_prefix`: the cosine begins at step 0, and
    the warm-up replaces its first steps.
    """
    return step / warmup_steps if step < warmup_steps else cosine(step, total_steps, 0)


def _progress(step: int, total_steps: int, warmup_steps: int) -> float:
    """Return the fraction of the decay that is over."""
    # At most 1: a schedule is stepped after the last step too, and in a cool-down.
    return min((step - warmup_steps) / (total_steps - warmup_steps), 1.0)


SCHEDULES: dict[str, Schedule] = {"linear": linear, "cosine": cosine, "timm": timm}


def build_lr_scheduler(
    optimizer: Optimizer,
    name: str,
    total_steps: int,
    warmup_steps: int = 0,
    cooldown_steps: int = 0,
    min_lr: float = 0.0,
    warmup_lr: float | None = None,
) -> LambdaLR:
    """Build the schedule ``name``, a key of `SCHEDULES`, to be stepped once an optimizer step.

    It decays to ``min_lr``, and stays there for the last ``cooldown_steps``. With ``warmup_lr`` the
    warm-up begins there, else near 0.
    """
    # With layer decay groups have lower rates: the head's is the peak, and factors hold for all.
    peak = max(group["lr"] for group in optimizer.param_groups)
    # LambdaLR multiplies each group's rate: all here are fractions of the peak.
    low = min_lr / peak

    def factor(step: int) -> float:
        if step < warmup_steps and warmup_lr is not None:
            return (warmup_lr + (peak - warmup_lr) * step / warmup_steps) / peak
        share = SCHEDULES[name](step, total_steps - cooldown_steps, warmup_steps)
        # MIN_LR bounds the decay alone: a warm-up may begin below it.
        return share if step < warmup_steps else low + (1 - low) * share

    return LambdaLR(optimizer, factor)
