"""Every repair in place, and the fault that it repairs in what it replaced (``__wrapped__``)."""

import math

import pytest
import torch
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR, FlatAnnealingLR, FlatAnnealingWarmupLR
from colossalai.nn.lr_scheduler.delayed import WarmupScheduler
from colossalai.utils import MultiTimer

TOTAL, WARMUP, BASE = 10, 3, 0.1


def learning_rates(scheduler_class: type, **options: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = scheduler_class(optimizer, total_steps=TOTAL, **options)
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def cosine(step: int, start: int) -> float:
    return BASE * (1 + math.cos(math.pi * (step - start) / (TOTAL - start))) / 2


def test_warmup_cosine_is_the_closed_form() -> None:
    expected = [BASE * (t + 1) / WARMUP if t < WARMUP else cosine(t, WARMUP) for t in range(TOTAL)]
    assert learning_rates(CosineAnnealingWarmupLR, warmup_steps=WARMUP) == pytest.approx(expected, abs=1e-12)


def test_flat_cosines_are_the_closed_form() -> None:
    expected = [BASE if t < 5 else cosine(t, 5) for t in range(TOTAL)]
    assert learning_rates(FlatAnnealingLR, pct_start=0.5) == pytest.approx(expected, abs=1e-12)
    expected = [BASE * (t + 1) / 2 if t < 2 else BASE if t < 6 else cosine(t, 6) for t in range(TOTAL)]
    rates = learning_rates(FlatAnnealingWarmupLR, warmup_steps=2, pct_start=0.5)
    assert rates == pytest.approx(expected, abs=1e-12)


@pytest.mark.filterwarnings("ignore:To get the last learning rate")
def test_upstreams_warmup_cosine_overshoots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WarmupScheduler, "get_lr", WarmupScheduler.get_lr.__wrapped__)
    peak = max(learning_rates(CosineAnnealingWarmupLR, warmup_steps=WARMUP))
    assert peak == pytest.approx(BASE * 2 / (1 + math.cos(math.pi / (TOTAL - WARMUP))))


def test_timers_run_without_a_gpu() -> None:
    timer = MultiTimer()
    timer.start("step")
    timer.stop("step", keep_in_history=True)
    assert timer.get_timer("step").get_history_sum() >= 0
