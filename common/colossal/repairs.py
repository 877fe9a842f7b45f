"""Faults of Colossal-AI 0.5.0 that are repaired in its own classes, once, on import."""

import functools
from collections.abc import Callable
from typing import Any

from common.colossal.import_stubs import replaced
from common.colossal.upstream import AMP_TYPE, CpuAccelerator, colossalai, delayed


def repair_old_paths() -> None:
    """Let config files written for older releases import `AMP_TYPE` from `colossalai.amp`; 0.5.0 moved it to legacy."""
    colossalai.amp.AMP_TYPE = AMP_TYPE


def repair_cpu_accelerator() -> None:
    """Let timers and loss scalers work on CPUs, where accelerator/cpu_accelerator.py:57-73 raises."""
    CpuAccelerator.synchronize = lambda self, device=None: None
    CpuAccelerator.device_count = lambda self: 0


def repair_warmup_schedulers() -> None:
    """Keep the peak of warm-up schedules that end in a cosine at the base learning rate.

    nn/lr_scheduler/delayed.py:80,117,164 call ``after_scheduler.get_lr()`` at the hand-over. torch's recursive cosine
    takes that for its second step: every later rate is too high, by 2 / (1 + cos(pi / T)) for a decay of T steps.
    Here the cosine is told that it is its first, and that it is asked for a step, which it would else warn about.
    """
    for scheduler in (delayed.DelayerScheduler, delayed.WarmupScheduler, delayed.WarmupDelayerScheduler):
        scheduler.get_lr = _hand_over_exactly(scheduler.get_lr)


def _hand_over_exactly(get_lr: Callable[[Any], list[float]]) -> Callable[[Any], list[float]]:
    @functools.wraps(get_lr)
    def exact_get_lr(self: Any) -> list[float]:
        after = self.after_scheduler
        with replaced(after, "_is_initial", not self.finished), replaced(after, "_get_lr_called_within_step", True):
            return get_lr(self)

    return exact_get_lr
