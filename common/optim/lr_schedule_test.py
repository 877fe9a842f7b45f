import math

import pytest
import torch
from torch.optim import SGD

from common.colossal import CosineAnnealingWarmupLR, LinearWarmupLR
from common.optim.lr_schedule import build_lr_scheduler, learning_rate_factor

PEAK = 1.8e-2
UPSTREAM = {"linear": LinearWarmupLR, "cosine": CosineAnnealingWarmupLR}


def build_sgd() -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)


def learning_rates(optimizer: SGD, scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    """Return the learning rate that each optimizer step is taken with."""
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("total", "warmup"), [(20, 0), (20, 5), (300, 150), (7, 6)])
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_equals_colossalais_scheduler(name: str, total: int, warmup: int) -> None:
    ours, theirs = build_sgd(), build_sgd()
    mine = learning_rates(ours, build_lr_scheduler(ours, name, total, warmup), total)
    reference = learning_rates(theirs, UPSTREAM[name](theirs, total_steps=total, warmup_steps=warmup), total)
    assert mine == pytest.approx(reference, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "step", "factor"),
    [
        ("linear", 0, 1 / 6),
        ("linear", 4, 5 / 6),
        ("linear", 5, 1.0),
        ("linear", 19, 1 / 15),
        ("linear", 20, 0.0),
        ("linear", 1000, 0.0),
        ("cosine", 0, 1 / 5),
        ("cosine", 4, 1.0),
        ("cosine", 5, 1.0),
        ("cosine", 19, 0.5 * (1 + math.cos(math.pi * 14 / 15))),
        ("cosine", 20, 0.0),
        ("cosine", 1000, 0.0),
    ],
)
def test_end_points(name: str, step: int, factor: float) -> None:
    value = learning_rate_factor(name, step, total_steps=20, warmup_steps=5)
    assert value == pytest.approx(factor, rel=1e-12, abs=0)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_never_negative_and_never_above_the_peak(name: str) -> None:
    factors = [learning_rate_factor(name, step, 100, 30) for step in range(250)]
    assert min(factors) == 0
    assert max(factors) == 1
    assert factors[:30] == sorted(factors[:30])
    assert factors[30:] == sorted(factors[30:], reverse=True)


def test_resumes_from_its_state() -> None:
    whole = build_sgd()
    expected = learning_rates(whole, build_lr_scheduler(whole, "linear", 20, 5), 20)
    first, second = build_sgd(), build_sgd()
    scheduler = build_lr_scheduler(first, "linear", 20, 5)
    learning_rates(first, scheduler, 8)
    resumed = build_lr_scheduler(second, "linear", 20, 5)
    resumed.load_state_dict(scheduler.state_dict())
    second.load_state_dict(first.state_dict())
    assert learning_rates(second, resumed, 12) == expected[8:]


@pytest.mark.parametrize(("total", "warmup"), [(10, 10), (10, 11), (10, -1), (0, 0)])
def test_warmup_has_to_leave_steps(total: int, warmup: int) -> None:
    with pytest.raises(ValueError, match=f"warmup_steps={warmup} must .* total_steps={total}"):
        build_lr_scheduler(build_sgd(), "linear", total, warmup)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="name='cosin' is none of linear, cosine; did you mean 'cosine'"):
        build_lr_scheduler(build_sgd(), "cosin", 10)
