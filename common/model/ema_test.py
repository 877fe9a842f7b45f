"""The moving average of weights and of batch norms' statistics."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from common.model.ema import EmaHook

SKIPPED = 7  # a step whose gradient is not finite


@pytest.mark.parametrize(
    ("decay", "warmup"),
    [
        (0.3, True),
        (0.9999, True),
        (0.9, False),
    ],
)
def test_averages_are_those_of_the_formula(decay, warmup):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    hook = EmaHook(model, decay, warmup)
    state = {name: p for name, p in model.state_dict().items() if p.is_floating_point()}
    expected = deepcopy(state)
    for step in range(1, 20):
        for parameter in model.parameters():
            update = torch.randn_like(parameter)
            parameter.detach().add_(update)
        model(torch.randn(8, 5))
        norm = torch.tensor(torch.inf if step == SKIPPED else 1.0)
        optimizer = SimpleNamespace(grad_norm=norm)
        engine = SimpleNamespace(optimizer=optimizer)
        trainer: Any = SimpleNamespace(step=step, update_done=True, engine=engine)
        hook.after_train_iter(trainer)
        if step == SKIPPED:
            continue
        warm = (1 + step) / (10 + step) if warmup else step - 1
        share = 1 - min(decay, warm)
        for name, average in expected.items():
            average.lerp_(state[name], share)
    torch.testing.assert_close(hook.averages, expected, rtol=1e-6, atol=1e-7)
    weights = deepcopy(state)
    hook.before_test(trainer)
    torch.testing.assert_close(state, hook.averages, rtol=0, atol=0)
    hook.after_test(trainer)
    torch.testing.assert_close(state, weights, rtol=0, atol=0)
