import math

import pytest
import torch
from torch import Tensor

from common.model.dropout import LEVELS, Dropout

COUNT = 1 << 22


def kept(p: float, *shape: int) -> Tensor:
    return Dropout(p)(torch.ones(shape)) != 0


@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 3, 0.97])
def test_rate_is_right_at_every_place_of_an_integer(p: float) -> None:
    """Within five standard errors, for each of the four values that share a random integer."""
    torch.manual_seed(0)
    rates = kept(p, COUNT).view(-1, 4).double().mean(0)
    error = math.sqrt(p * (1 - p) * 4 / COUNT)
    torch.testing.assert_close(rates, torch.full_like(rates, 1 - p), rtol=0, atol=5 * error)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_and_calls_are_independent(p: float) -> None:
    torch.manual_seed(1)
    centred, other = (kept(p, COUNT).double() - (1 - p) for _ in range(2))
    pairs = [(centred, other), *((centred[:-n], centred[n:]) for n in (1, 2, 3, 4, 8, 65, 256))]
    for first, second in pairs:
        correlation = (first * second).mean() / (p * (1 - p))
        assert abs(correlation) < 5 / math.sqrt(COUNT)


@pytest.mark.parametrize("p", [1e-5, 0.1, 0.25, 0.9, 0.99998])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_dropped_or_scaled_exactly(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x = torch.randn(100_003).to(dtype)
    y = Dropout(p)(x)
    share = round((1 - p) * LEVELS) / LEVELS
    assert share == pytest.approx(1 - p, abs=1e-5)
    is_kept = y != 0
    assert y.dtype == dtype
    assert torch.equal(y[is_kept], x[is_kept] * (1 / share))


@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (2, 3, 5)])
def test_gradient_passes_what_is_kept(shape: tuple[int, ...]) -> None:
    x = torch.full(shape, 2.0, requires_grad=True)
    y = Dropout(0.25)(x)
    y.backward(torch.full(shape, 3.0))
    assert torch.equal(x.grad, torch.where(y == 0, 0.0, 3.0 / 0.75))


def test_without_training_or_rate_nothing_is_drawn() -> None:
    x, state = torch.randn(8), torch.get_rng_state()
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert torch.equal(torch.get_rng_state(), state)
    assert not Dropout(1.0)(x).any()
    assert not Dropout(0.5).state_dict()
