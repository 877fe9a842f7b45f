import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

from common.colossal import LinearWarmupLR
from common.optim.lr_schedule import SCHEDULES, build_lr_scheduler

PEAK = 1.8e-2


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
def test_equals_colossalais_linear_and_torchs_cosine_schedule(total: int, warmup: int) -> None:
    ours, theirs = build_sgd(), build_sgd()
    mine = learning_rates(ours, build_lr_scheduler(ours, "linear", total, warmup), total)
    reference = learning_rates(theirs, LinearWarmupLR(theirs, total_steps=total, warmup_steps=warmup), total)
    assert mine == pytest.approx(reference, rel=1e-9)
    ours, theirs = build_sgd(), build_sgd()
    mine = learning_rates(ours, build_lr_scheduler(ours, "cosine", total, warmup), total)
    reference = learning_rates(theirs, CosineAnnealingLR(theirs, total - warmup), total - warmup)
    assert mine == pytest.approx([PEAK * (step + 1) / warmup for step in range(warmup)] + reference, rel=1e-9)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_rate_stays_0_after_the_last_step(name: str) -> None:
    assert [SCHEDULES[name](step, 20, 5) for step in (20, 1000)] == [0, 0]


@pytest.mark.parametrize(("total", "warmup"), [(10, 10), (10, 11), (10, -1), (0, 0)])
def test_warmup_has_to_leave_steps(total: int, warmup: int) -> None:
    with pytest.raises(ValueError, match=f"warmup_steps={warmup} must .* total_steps={total}"):
        build_lr_scheduler(build_sgd(), "linear", total, warmup)
