"""The noise scale, against formulas, all per-sample gradients, and itself in other layouts.

tensor_parallel/parity_test.py has every parallel mode beside a plain loop.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from common.engine.amp_test import MODES
from common.engine.engine import Engine, initialize
from common.engine.noise_scale import DECAY
from common.engine.upstream import ParallelMode, all_reduce, gpc
from common.testing.parity_cases import build_tiny_model
from common.testing.ranks import launched, run_ranks

LOG = {"noise_scale": True}


def build(model: nn.Module, criterion: Any, learning_rate: float = 0.0) -> Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    return initialize(model, optimizer, criterion)[0]


def train(engine: Engine, batches: Iterator[Any], steps: int) -> list[float]:
    """Return the averages of |G|^2 and tr(Sigma) after ``steps``, and the noise scale."""
    for _ in range(steps):
        for _ in engine.train_step(batches):
            pass
    scale = engine.noise_scale
    averages = all_reduce(scale.averages, ParallelMode.GLOBAL) / gpc.get_world_size(
        ParallelMode.GLOBAL
    )
    # The averages' weights, 1 - DECAY for the last step, have a sum below 1.
    return [*(averages / (1 - DECAY**steps)).tolist(), scale.value().item()]


class Mean(nn.Module):
    """Estimate the mean of its inputs: the gradient of |w - x|^2 / 2 is w - x."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight - x


def test_a_linear_model_has_the_formulas_values():
    """x ~ N(mean, 0.25 I) of 400 numbers, |mean|^2 = 4: |G|^2 is 4, tr(Sigma) 100."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.full((400,), 0.1)

    def draw() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield mean + 0.5 * torch.randn(8, 400, generator=generator), torch.empty(8)

    with launched(gradient_accumulation=4, clip_grad_norm=0.01, LOG=LOG):
        engine = build(Mean(400), lambda error, _: error.square().sum(1).mean() / 2)
        found = train(engine, draw(), 2000)
    assert found == pytest.approx([4, 100, 25], rel=0.05)


def test_a_vit_has_the_noise_of_its_per_sample_gradients():
    model = build_tiny_model()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 16, 16, generator=generator)
    labels = torch.randint(8, (64,), generator=generator)

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, weights, image[None]), label[None])

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no batching rule
        by_name = vmap(grad(loss), (None, 0, 0))(weights, images, labels)
    gradients = torch.cat([of.flatten(1) for of in by_name.values()], 1)
    signal = gradients.mean(0).square().sum().item()
    noise = gradients.var(0, correction=0).sum().item()

    def draw() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            drawn = torch.randint(64, (16,), generator=generator)
            yield images[drawn], labels[drawn]

    with launched(gradient_accumulation=8, LOG=LOG):
        found = train(build(model, cross_entropy), draw(), 50)
    assert found == pytest.approx([signal, noise, noise / signal], rel=0.05)


def train_four_micro_batches(accumulation: int, mode: str) -> list[float]:
    """Train for 3 steps of 4 micro-batches of 4 images, the second of which overflows."""
    fp16 = MODES[mode] | {"init_scale": 1024.0} if mode else None
    with launched(gradient_accumulation=accumulation, LOG=LOG, fp16=fp16):
        engine = build(build_tiny_model(), cross_entropy, 0.1)
        ranks, rank = gpc.get_world_size(ParallelMode.DATA), gpc.get_local_rank(ParallelMode.DATA)
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(3, 4, 4, 3, 16, 16, generator=generator)
        images[1, 0, 0] = torch.inf
        labels = torch.randint(8, (3, 4, 4), generator=generator)
        own = (every[:, rank::ranks].flatten(0, 1) for every in (images, labels))
        return train(engine, zip(*own, strict=True), 3)


def test_ranks_and_accumulation_share_out_the_same_micro_batches():
    in_float32 = None
    for mode in ("", "TORCH float16", "TORCH bfloat16"):
        one, *others = (
            run_ranks(ranks, train_four_micro_batches, 4 // ranks, mode)[0] for ranks in (1, 2, 4)
        )
        assert others == [pytest.approx(one, rel=1e-5)] * 2
        in_float32 = in_float32 or one
        assert one == pytest.approx(in_float32, rel=0.02)
