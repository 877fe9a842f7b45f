"""Accumulating, clipping and updating, against torch's own functions."""

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from common.colossal.step_optimizer import StepOptimizer

MAX_NORM = 0.2


def build() -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.5), [torch.randn(6, 4), torch.randn(6, 4)]


def drive(wrapper: StepOptimizer, model: nn.Module, batches: list[Tensor], max_norm: float) -> None:
    """Call what upstream's engine calls for every micro-batch."""
    for batch in batches:
        wrapper.zero_grad()
        wrapper.backward(model(batch).square().mean())
        wrapper.clip_grad_by_norm(max_norm)
        wrapper.step()


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def torch_step(max_norm: float) -> tuple[Tensor, Tensor]:
    """Return the weights and the norm after one plain step of torch's on both batches together."""
    model, optimizer, batches = build()
    model(torch.cat(batches)).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
    optimizer.step()
    return weights(model), norm


@pytest.mark.parametrize("max_norm", [0.0, MAX_NORM, 1e3])
@pytest.mark.parametrize("scaler", [None, GradScaler("cpu", init_scale=2.0**10)])
def test_one_step_of_two_micro_batches(max_norm: float, scaler: GradScaler | None) -> None:
    expected, norm = torch_step(max_norm)
    model, optimizer, batches = build()
    before, step_optimizer = weights(model), StepOptimizer(optimizer, 2, scaler)
    drive(step_optimizer, model, batches[:1], max_norm)
    assert torch.equal(weights(model), before)
    assert step_optimizer.completes_step
    assert step_optimizer.grad_norm.isnan()
    drive(step_optimizer, model, batches[1:], max_norm)
    torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(step_optimizer.grad_norm, norm, rtol=1e-6, atol=0)
    assert norm > MAX_NORM  # so that clipping was needed
    assert step_optimizer.accumulated == 0
