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
        noise_scale = engine.noise_scale
        # The averages' weights, 1 - DECAY for the last step, have a sum below 1.
        averages = noise_scale.averages / (1 - DECAY**steps)
        result = averages.tolist()
        result.append(noise_scale.value().item())
        if name != "sgd":
            result.append(noise_scale.optimizer_value().item())
        return result


def expected_values(signal: Tensor, noise: Tensor, weight: Tensor) -> list[float]:
    """Return what ``measure`` should, of the parameters' signal, noise and weight."""
    sum_of_signal = signal.sum().item()
    sum_of_noise = noise.sum().item()
    in_the_norm = (weight @ noise) / (weight @ signal)
    return [
        sum_of_signal,
        sum_of_noise,
        sum_of_noise / sum_of_signal,
        in_the_norm.item(),
    ]


@pytest.mark.parametrize("fp16", [None, MODES["TORCH float16"]])  # which has a loss scale
def test_a_linear_model_has_the_formulas_values(fp16):
    """x ~ N(mean, 0.25 I) of 400 numbers, |mean|^2 = 4: |G|^2 is 4, tr(Sigma) 100."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Any:
        noise = torch.randn(8, 400, generator=generator)
        return torch.ones(8, 1), 0.1 + 0.5 * noise

    # Its outputs are its weights w. The gradient of |w - x|^2 / 2 is w - x.
    model = nn.Linear(1, 400, bias=False)
    nn.init.zeros_(model.weight)

    def criterion(w: Tensor, x: Tensor) -> Tensor:
        of_samples = (w - x).square().sum(1)
        return of_samples.mean() / 2

    found = measure(
        model,
        criterion,
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
            # of length 3 and 1
            self.first = nn.Parameter(torch.full((400,), 3 / 20))
            self.second = nn.Parameter(torch.full((400,), 1 / 20))

        def forward(self, noise: Tensor) -> Tensor:
            gradients = mean[:, None] + deviation[:, None] * noise  # [8, 2, 400]
            weights = torch.stack([self.first, self.second])
            return (gradients * weights).sum((1, 2))

    def draw() -> Any:
        noise = torch.randn(8, 2, 400, generator=generator)
        unused = torch.zeros(8)
        return noise, unused

    found = measure(
        Pair(),
        lambda out, _: out.mean(),
        draw,
        400,
        "lamb",
        gradient_accumulation=4,
        fp16=fp16,
    )
    signal = 400 * mean.square()
    noise = 400 * deviation.square()
    weight = length / (signal + noise / 32).sqrt()
    expected = expected_values(signal, noise, weight)
    assert found == pytest.approx(expected, rel=0.05)


def update_norm(name: str, key: str, weight: Tensor) -> float:
    """Return the norm of the update of the weight named ``key``, over a number."""
    if name == "lamb":
        return weight.norm().item()
    is_matrix_of_block = "blocks" in key and weight.ndim == 2
    return weight.numel() ** 0.5 if is_matrix_of_block else 0.0


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_a_vit_has_the_noise_of_its_per_sample_gradients(name):
    model = build_tiny_model()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 16, 16, generator=generator)
    labels = torch.randint(8, (64,), generator=generator)
    gradients = []  # [64 samples][parameters]
    for image, label in zip(images.split(1), labels.split(1), strict=True):
        loss = cross_entropy(model(image), label)
        of_sample = torch.autograd.grad(loss, model.parameters())
        gradients.append(of_sample)
    means = []
    variances = []
    for of_parameter in zip(*gradients, strict=True):
        samples = torch.stack(of_parameter)
        mean = samples.mean(0)
        variance = samples.var(0, correction=0)
        means.append(mean.square().sum())
        variances.append(variance.sum())
    signal = torch.stack(means)
    noise = torch.stack(variances)
    lengths = [update_norm(name, key, weight) for key, weight in model.named_parameters()]
    weight = torch.tensor(lengths) / (signal + noise / 128).sqrt()
    expected = expected_values(signal, noise, weight)

    def draw() -> Any:
        drawn = torch.randint(64, (16,), generator=generator)
        return images[drawn], labels[drawn]

    found = measure(model, cross_entropy, draw, 50, name, gradient_accumulation=8)
    assert found == pytest.approx(expected, rel=0.05)
