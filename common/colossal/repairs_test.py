"""Every repair in place, and the fault that it mends in what it replaced (``__wrapped__``)."""

import math

import pytest
import torch
from colossalai.legacy.trainer.hooks import _metric_hook as metrics
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR, FlatAnnealingLR, FlatAnnealingWarmupLR
from colossalai.nn.lr_scheduler.delayed import WarmupScheduler
from colossalai.utils import MultiTimer

from common.testing.ranks import launched, run_ranks

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


def read_twice(repaired: bool) -> list[tuple[float, float]]:
    with launched():
        loss = metrics.LossMetric(epoch_only=False)
        loss.update(torch.tensor(1.0))
        loss.update(torch.tensor(2.0))
        accuracy = metrics.AccuracyMetric(True, accuracy_func=lambda logits, targets: (logits == targets).sum())
        accuracy.update(torch.tensor([1, 2]), torch.tensor([1, 0]), 2)
        throughput = metrics.ThroughputMetric(epoch_only=False)
        throughput.update(8, 0.5)
        pairs = []
        for metric in (loss, accuracy, throughput):
            read = type(metric).get_accumulated_value
            read = read if repaired else read.__wrapped__
            pairs.append((read(metric), read(metric)))
        return pairs


def test_metrics_can_be_read_twice() -> None:
    expected = [pytest.approx(pair) for pair in ((1.5, 1.5), (0.5, 0.5), (32.0, 32.0))]
    assert run_ranks(2, read_twice, True) == [expected, expected]


def test_upstreams_metrics_change_when_read() -> None:
    loss, _, throughput = run_ranks(2, read_twice, False)[0]
    assert loss == pytest.approx((1.5, 0.75))
    assert throughput == pytest.approx((32.0, 64.0))


def test_timers_run_without_a_gpu() -> None:
    timer = MultiTimer()
    timer.start("step")
    timer.stop("step", keep_in_history=True)
    assert timer.get_timer("step").get_history_sum() >= 0
