"""The noise scale of a linear model, against its formula.

tensor_parallel/parity_test.py has every parallel mode beside a plain loop.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from common.engine.amp_test import MODES
from common.engine.engine import initialize
from common.engine.noise_scale import DECAY
from common.testing.ranks import launched

STEPS = 2000


@pytest.mark.parametrize("fp16", [None, MODES["TORCH float16"]])  # which has a loss scale
def test_a_linear_model_has_the_formulas_values(fp16):
    """x ~ N(mean, 0.25 I) of 400 numbers, |mean|^2 = 4: |G|^2 is 4, tr(Sigma) 100."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.ones(8, 1), 0.1 + 0.5 * torch.randn(8, 400, generator=generator)

    # Its outputs are its weights w. The gradient of |w - x|^2 / 2 is w - x.
    model = nn.Linear(1, 400, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with launched(
        gradient_accumulation=4, clip_grad_norm=0.01, LOG={"noise_scale": True}, fp16=fp16
    ):
        engine, *_ = initialize(model, optimizer, lambda w, x: (w - x).square().sum(1).mean() / 2)
        for _ in range(STEPS):
            list(engine.train_step(draw()))
        # The averages' weights, 1 - DECAY for the last step, have a sum below 1.
        signal, noise = engine.noise_scale.averages / (1 - DECAY**STEPS)
        found = signal.item(), noise.item(), engine.noise_scale.value().item()
    assert found == pytest.approx((4, 100, 25), rel=0.05)
