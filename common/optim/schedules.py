"""Schedules of the learning rate: a linear warm-up, then a decay, at once or after a stable phase.

A schedule is a function of the optimizer step, counted from 0, and of the numbers of all and of
warm-up steps. It returns a fraction of the peak. Where steps have several batches, its steps are
those of the smallest, and a step may be a fraction.
"""

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from common.errors import UserError

Schedule = Callable[[float, int, int], float]


def linear(step: float, total_steps: int, warmup_steps: int) -> float:
    """Return Colossal-AI's LinearWarmupLR: 1 / (W + 1) at first, 1 at step W of T, 1 / (T - W) at
    the last.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return 1 - _progress(step, total_steps, warmup_steps)


def cosine(step: float, total_steps: int, warmup_steps: int) -> float:
    """Return Colossal-AI's CosineAnnealingWarmupLR without its overshoot of the peak, which
    `upstream` repairs.

    It is 1 / W at first, 1 at step W of T, (1 + cos(pi (T - W - 1) / (T - W))) / 2 at the last.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * _progress(step, total_steps, warmup_steps)))


def timm(step: float, total_steps: int, warmup_steps: int) -> float:
    """Return timm's CosineLRScheduler without `warmup_prefix`: the cosine begins at step 0, and
    the warm-up replaces its first steps.
    """
    return step / warmup_steps if step < warmup_steps else cosine(step, total_steps, 0)


def linear_to_sqrt(step: float, total_steps: int, warmup_steps: int) -> float:
    """Return the warm-up of `linear`, then 1 - sqrt(t) of the decay's progress t (arXiv
    2405.18392).
    """
    if step < warmup_steps:
        return linear(step, total_steps, warmup_steps)
    return 1 - math.sqrt(_progress(step, total_steps, warmup_steps))


def _progress(step: float, total_steps: int, warmup_steps: int) -> float:
    """Return the fraction of the decay that is over."""
    # At most 1: a schedule is stepped after the last step too, and in a cool-down.
    return min((step - warmup_steps) / (total_steps - warmup_steps), 1.0)


SCHEDULES: dict[str, Schedule] = {
    "linear": linear,
    "cosine": cosine,
    "timm": timm,
    "wsd": linear,
    "wsd_sqrt": linear_to_sqrt,
}
# Warm-up, stable, decay: these stay at the peak until the last ``decay_steps``.
STABLE = ("wsd", "wsd_sqrt")
# Factors on the rate of a step, by the ratio of its batch to the full one: BATCH_LR.
BATCH_FACTORS: dict[str, Callable[[float], float]] = {
    "sqrt": math.sqrt,
    "linear": float,
    "none": lambda ratio: 1.0,
}


def count_decay_epochs(name: str, decay: float, epochs: int) -> float:
    """Return the epochs of DECAY, a share of ``epochs`` if below 1; 0 without a stable phase."""
    if name not in STABLE:
        return 0.0
    return decay * epochs if decay < 1 else decay


def build_lr_scheduler(optimizer: Optimizer, *schedule: Any, **options: Any) -> LambdaLR:
    """Build a schedule, to be stepped once an optimizer step.

    The arguments after ``optimizer`` are those of `build_factor` after ``peak``.
    """
    # With layer decay groups have lower rates: the head's is the peak, and factors hold for all.
    peak = max(group["lr"] for group in optimizer.param_groups)
    # LambdaLR multiplies each group's rate: all here are fractions of the peak.
    return LambdaLR(optimizer, build_factor(peak, *schedule, **options))


def build_factor(
    peak: float,
    name: str,
    total_steps: int,
    warmup_steps: int = 0,
    cooldown_steps: int = 0,
    min_lr: float = 0.0,
    warmup_lr: float | None = None,
    decay_steps: int = 0,
) -> Callable[[float], float]:
    """Return the function that gives the fraction of ``peak`` at a step.

    ``name`` is a key of `SCHEDULES`. It decays to ``min_lr``, and stays there for the last
    ``cooldown_steps``; one of `STABLE` decays in the ``decay_steps`` before these. With
    ``warmup_lr`` the warm-up begins there, else near 0.
    """
    if name in STABLE and not decay_steps:
        raise UserError(f"LR_SCHEDULE={name!r}: pass plan.decay_steps to build_lr_scheduler")
    schedule = SCHEDULES[name]
    low = min_lr / peak
    end = total_steps - cooldown_steps
    # A decay after a stable phase is that of a schedule whose warm-up ends with that phase.
    begin = end - decay_steps if decay_steps else warmup_steps

    def factor(step: float) -> float:
        # MIN_LR bounds the decay alone: a warm-up may begin below it.
        if step >= warmup_steps:
            return low + (1 - low) * schedule(max(step, begin), end, begin)
        if warmup_lr is None:
            # At most 1: steps of several batches may begin between two of the schedule.
            return min(schedule(step, end, warmup_steps), 1.0)
        return (warmup_lr + (peak - warmup_lr) * step / warmup_steps) / peak

    return factor
