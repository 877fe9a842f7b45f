"""Skipped updates: what batch norms keep, and how many in a row end a run.

In parity_test.py and amp_test.py they leave no trace in any mode.
"""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from common.engine.engine import Engine, initialize
from common.engine.upstream import AMP_TYPE
from common.errors import AgreedError
from common.optim.build import build_optimizer
from common.testing.ranks import launched

FP16 = {"mode": AMP_TYPE.TORCH, "dtype": "float16", "init_scale": 1024.0}


def update(engine: Engine, gradient: float) -> None:
    """Train on a loss that is ``gradient`` times the sum of the linear model's squared outputs."""
    engine.zero_grad()
    output = engine(torch.ones(1, 3))
    loss = gradient * output.square().sum()
    engine.backward(loss)
    engine.step()


@pytest.mark.parametrize("begins_with_zero_grad", [True, False])
def test_batch_norms_do_not_count_what_is_not_finite(begins_with_zero_grad):
    norm = nn.BatchNorm1d(3)
    images = torch.full((2, 3), torch.inf)
    with launched():
        engine, *_ = initialize(norm, build_optimizer(norm))
        if begins_with_zero_grad:
            engine.zero_grad()
        loss = engine(images).sum()
        engine.backward(loss)
        engine.step()
    assert torch.equal(norm.running_var, torch.ones(3))  # else NaN
    assert torch.equal(norm.running_mean, torch.zeros(3))  # else infinite


def test_too_many_in_a_row_stop_the_run_and_one_that_resumes_it():
    def build() -> Engine:
        model = nn.Linear(3, 2)
        optimizer = SGD(model.parameters(), lr=0.1)  # not fused
        engine, *_ = initialize(model, optimizer)
        return engine

    with launched(MAX_SKIPPED=2, fp16=FP16):
        first = build()
        resumed = build()
        schedule = LambdaLR(resumed.optimizer.optim, lambda step: 1.0)
        for gradient in (1.0, torch.nan, torch.nan, 1.0, torch.nan, torch.nan):
            update(first, gradient)
        state = first.optimizer.step_state()
        # A run in another dtype has no scaler.
        resumed.optimizer.load_step_state(state | {"scaler": None})
        resumed.optimizer.load_step_state(state)
        assert resumed.optimizer.step_state() == state
        resumed.optimizer.counter.every = 8  # a GPU's counters are not read after every update
        update(resumed, torch.nan)
        schedule.step()  # no warning about the skipped first update
        message = "^by step {}, 3 con.*SKIPPED=2.* to 3.2e.01: lower .* float16$"
        with pytest.raises(AgreedError, match=message.format(7)):
            update(first, torch.nan)
        with pytest.raises(AgreedError, match=message.format(8)):
            update(resumed, 1.0)
        first.optimizer.scaler = None
        first.optimizer.load_step_state(state)
