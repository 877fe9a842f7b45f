"""The noise scale, against a formula and against all per-sample gradients.

tensor_parallel/parity_test.py has every parallel mode beside a plain loop.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from common.engine.amp_test import MODES
from common.engine.engine import initialize
from common.engine.noise_scale import DECAY
from common.testing.parity_cases import build_tiny_model
from common.testing.ranks import launched


def measure(
    model: nn.Module,
    criterion: Callable[..., Tensor],
    draw: Callable[[], Any],
    steps: int,
    **config: Any,
) -> list[float]:
    """Return |G|^2, tr(Sigma) and the noise scale after steps that change no weight."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with launched(clip_grad_norm=0.01, LOG={"noise_scale": True}, **config):
        engine, *_ = initialize(model, optimizer, criterion)
        for _ in range(steps):
            list(engine.train_step(iter(draw, None)))
        # The averages' weights, 1 - DECAY for the last step, have a sum below 1.
        averages = engine.noise_scale.averages / (1 - DECAY**steps)
        return [*averages.tolist(), engine.noise_scale.value().item()]


@pytest.mark.parametrize("fp16", [None, MODES["TORCH float16"]])  # which has a loss scale
def test_a_linear_model_has_the_formulas_values(fp16):
    """x ~ N(mean, 0.25 I) of 400 numbers, |mean|^2 = 4: |G|^2 is 4, tr(Sigma) 100."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Any:
        return torch.ones(8, 1), 0.1 + 0.5 * torch.randn(8, 400, generator=generator)

    # Its outputs are its weights w. The gradient of |w - x|^2 / 2 is w - x.
    model = nn.Linear(1, 400, bias=False)
    nn.init.zeros_(model.weight)

    found = measure(
        model,
        lambda w, x: (w - x).square().sum(1).mean() / 2,
        draw,
        400,
        gradient_accumulation=4,
        fp16=fp16,
    )
    assert found == pytest.approx([4, 100, 25], rel=0.05)


def test_a_vit_has_the_noise_of_its_per_sample_gradients():
    model = build_tiny_model()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 16, 16, generator=generator)
    labels = torch.randint(8, (64,), generator=generator)
    gradients = []
    for image, label in zip(images.split(1), labels.split(1), strict=True):
        loss = cross_entropy(model(image), label)
        gradients.append(parameters_to_vector(torch.autograd.grad(loss, model.parameters())))
    signal = torch.stack(gradients).mean(0).square().sum().item()
    noise = torch.stack(gradients).var(0, correction=0).sum().item()

    def draw() -> Any:
        drawn = torch.randint(64, (16,), generator=generator)
        return images[drawn], labels[drawn]

    found = measure(model, cross_entropy, draw, 50, gradient_accumulation=8)
    assert found == pytest.approx([signal, noise, noise / signal], rel=0.05)
