"""The learning rate of every optimizer step: linear warm-up, then linear or cosine decay to zero."""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

# The learning rate of an optimizer step, counted from 0, as a fraction of the peak; given the total and warm-up steps.
Schedule = Callable[[int, int, int], float]


def linear(step: int, total_steps: int, warmup_steps: int) -> float:
    """Equals Colossal-AI's LinearWarmupLR: 1 / (W + 1) at first, 1 at step W of T, 1 / (T - W) at the last."""
    return (step + 1) / (warmup_steps + 1) if step < warmup_steps else 1 - _progress(step, total_steps, warmup_steps)


def cosine(step: int, total_steps: int, warmup_steps: int) -> float:
    """Equals Colossal-AI's CosineAnnealingWarmupLR, but for its overshoot of the peak by 2 / (1 + cos(pi / (T - W))).

    1 / W at first, 1 at step W of T, (1 + cos(pi (T - W - 1) / (T - W))) / 2 at the last.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * _progress(step, total_steps, warmup_steps)))


def _progress(step: int, total_steps: int, warmup_steps: int) -> float:
    return min((step - warmup_steps) / (total_steps - warmup_steps), 1.0)


SCHEDULES: dict[str, Schedule] = {"linear": linear, "cosine": cosine}


def build_lr_scheduler(optimizer: Optimizer, name: str, total_steps: int, warmup_steps: int = 0) -> LambdaLR:
    """Build the schedule `name`, one of `SCHEDULES`, to be stepped once an optimizer step.

    Raises ValueError for a warm-up that leaves no step to train at the peak.
    """
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must be at least 0 and below total_steps={total_steps}")
    return LambdaLR(optimizer, lambda step: SCHEDULES[name](step, total_steps, warmup_steps))
