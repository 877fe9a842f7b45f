"""The noise scale, against a formula and against all per-sample gradients.

tensor_parallel/parity_test.py has every parallel mode beside a plain loop.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from common.engine.amp_test import MODES
from common.engine.engine import initialize
from common.engine.noise_scale import DECAY
from common.optim.build import build_optimizer
from common.testing.parity_cases import build_tiny_model
from common.testing.ranks import launched


def measure(
    model: nn.Module,
    criterion: Callable[..., Tensor],
    draw: Callable[[], Any],
    steps: int,
    name: str = "sgd",
    **config: Any,
) -> list[float]:
    """Return |G|^2, tr(Sigma) and the noise scale after steps that change no weight.

    With LAMB and Muon also the noise scale in their norm.
    """
    optimizer = build_optimizer(model, name, learning_rate=0.0)
    with launched(clip_grad_norm=0.01, LOG={"noise_scale": True}, **config):
        engine, *_ = initialize(model, optimizer, criterion)
        for _ in range(steps):
            list(engine.train_step(iter(draw, None)))
        # The averages' weights, 1 - DECAY for the last step, have a sum below 1.
        averages = engine.noise_scale.averages / (1 - DECAY**steps)
        values = [engine.noise_scale.value()]
        if name != "sgd":
            values.append(engine.noise_scale.optimizer_value())
        return [*averages.tolist(), *(value.item() for value in values)]


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


@pytest.mark.parametrize("fp16", [None, MODES["TORCH float16"]])
def test_lamb_weighs_the_tensors_of_a_linear_model_by_the_formula(fp16):
    """By their updates' norms, 3 and 1, over the norms of their gradients of 32 images."""
    generator = torch.Generator().manual_seed(0)
    length = torch.tensor([3.0, 1.0])
    mean = torch.tensor([0.1, 0.5])  # of a number's gradient
    deviation = torch.tensor([0.5, 2.0])

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            numbers = torch.ones(2, 400) * (length / 20)[:, None]
            self.first, self.second = map(nn.Parameter, numbers)

        def forward(self, noise: Tensor) -> Tensor:
            gradients = mean[:, None] + deviation[:, None] * noise  # [8, 2, 400]
            return (gradients * torch.stack([self.first, self.second])).sum((1, 2))

    def draw() -> Any:
        return torch.randn(8, 2, 400, generator=generator), torch.zeros(8)

    config = dict(gradient_accumulation=4, fp16=fp16)
    found = measure(Pair(), lambda out, _: out.mean(), draw, 400, "lamb", **config)
    signal = 400 * mean.square()
    noise = 400 * deviation.square()
    weight = length / (signal + noise / 32).sqrt()
    expected = [signal.sum(), noise.sum(), noise.sum() / signal.sum()]
    expected.append((weight @ noise) / (weight @ signal))
    assert found == pytest.approx([value.item() for value in expected], rel=0.05)


def update_norm(name: str, key: str, weight: Tensor) -> float:
    """Return the norm of the update of the weight named ``key``, over a number."""
    if name == "lamb":
        return weight.norm().item()
    return weight.numel() ** 0.5 if "blocks" in key and weight.ndim == 2 else 0.0


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_a_vit_has_the_noise_of_its_per_sample_gradients(name):
    model = build_tiny_model()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 16, 16, generator=generator)
    labels = torch.randint(8, (64,), generator=generator)
    gradients = []
    for image, label in zip(images.split(1), labels.split(1), strict=True):
        loss = cross_entropy(model(image), label)
        of_sample = torch.autograd.grad(loss, model.parameters())
        gradients.append([grad.flatten() for grad in of_sample])
    tensors = [torch.stack(column) for column in zip(*gradients, strict=True)]  # each [64, n]
    signal = torch.stack([tensor.mean(0).square().sum() for tensor in tensors])
    noise = torch.stack([tensor.var(0, correction=0).sum() for tensor in tensors])
    lengths = [update_norm(name, key, weight) for key, weight in model.named_parameters()]
    weight = torch.tensor(lengths) / (signal + noise / 128).sqrt()
    expected = [signal.sum(), noise.sum(), noise.sum() / signal.sum()]
    expected.append((weight @ noise) / (weight @ signal))

    def draw() -> Any:
        drawn = torch.randint(64, (16,), generator=generator)
        return images[drawn], labels[drawn]

    found = measure(model, cross_entropy, draw, 50, name, gradient_accumulation=8)
    assert found == pytest.approx([value.item() for value in expected], rel=0.05)
