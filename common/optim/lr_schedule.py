"""The learning rate of every optimizer step: linear warm-up, then linear or cosine decay to zero."""

import functools
import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from common.errors import did_you_mean

_NAMES = ("linear", "cosine")


def learning_rate_factor(name: str, step: int, total_steps: int, warmup_steps: int) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0, as a fraction of the peak.

    Equals Colossal-AI's LinearWarmupLR and, but for an overshoot of its peak by 2 / (1 + cos(pi / (T - W))),
    CosineAnnealingWarmupLR, with W warm-up steps of T:

        step    linear           cosine
        0       1 / (W + 1)      1 / W, or 1 without warm-up
        W       1                1
        T - 1   1 / (T - W)      (1 + cos(pi (T - W - 1) / (T - W))) / 2
        T...    0                0
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1 if name == "linear" else warmup_steps)
    progress = min((step - warmup_steps) / (total_steps - warmup_steps), 1.0)
    return 1 - progress if name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


def build_lr_scheduler(optimizer: Optimizer, name: str, total_steps: int, warmup_steps: int = 0) -> LambdaLR:
    """Build the schedule `name` ("linear" or "cosine"), to be stepped once an optimizer step.

    Raises ValueError for an unknown name, and for a warm-up that leaves no step to train at the peak.
    """
    if name not in _NAMES:
        raise ValueError(f"name={name!r} is none of {', '.join(_NAMES)}{did_you_mean(name, _NAMES)}")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must be at least 0 and below total_steps={total_steps}")
    factor = functools.partial(learning_rate_factor, name, total_steps=total_steps, warmup_steps=warmup_steps)
    return LambdaLR(optimizer, factor)
