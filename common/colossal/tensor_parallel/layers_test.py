"""The layers compared with PyTorch's."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.colossal import gpc
from common.colossal.tensor_parallel.layers import LayerNorm, Linear2D
from common.colossal.tensor_parallel.layout import ROW_2D
from common.estimate.traffic import Traffic
from common.testing.parity_cases import CASES
from common.testing.ranks import launched, run_ranks

WIDTH = 8


@functools.cache
def on_square() -> list[dict[str, Any]]:
    """Return what each of the four ranks of a 2d launch finds."""
    return run_ranks(4, look_around)


def look_around() -> dict[str, Any]:
    with launched(parallel=CASES["2d-4"][1]):
        return {
            "layer norms": {offset: layer_norms(offset) for offset in (0.0, 100.0)},
            "error in half": layer_norm_error(),
            "product": product_under_autocast(),
            "collectives": count_collectives(),
        }


def own(x: Tensor) -> Tensor:
    """Return this rank's channels of x [..., WIDTH]."""
    return x.chunk(2, dim=-1)[gpc.get_local_rank(ROW_2D)].clone()


def layer_norms(offset: float) -> list[tuple[Tensor, Tensor]]:
    """Return (ours, PyTorch's): output and the gradients of input, weight and bias, for inputs around ``offset``."""
    torch.manual_seed(0)
    x, grad = offset + torch.randn(3, 5, WIDTH), torch.randn(3, 5, WIDTH)
    whole = nn.LayerNorm(WIDTH, eps=1e-6)
    nn.init.normal_(whole.weight), nn.init.normal_(whole.bias)
    ours = LayerNorm(nn.Parameter(own(whole.weight)), nn.Parameter(own(whole.bias)), whole.eps, ROW_2D)
    inputs, piece = x.clone().requires_grad_(), own(x).requires_grad_()
    expected, output = whole(inputs), ours(piece)
    expected.backward(grad)
    output.backward(own(grad))
    pairs = [(output, expected), (piece.grad, inputs.grad)]
    pairs += [(ours.weight.grad, whole.weight.grad), (ours.bias.grad, whole.bias.grad)]
    return [(found.detach(), own(expected.detach())) for found, expected in pairs]


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_layer_norm(offset: float) -> None:
    for rank in on_square():
        for found, expected in rank["layer norms"][offset]:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 if offset else 1e-6)


def layer_norm_error() -> float:
    """Return the largest error of the layer norm in half precision, for a deviation of 100, whose square overflows."""
    torch.manual_seed(0)
    x = 100 * torch.randn(4, 1024).half()
    expected = own(F.layer_norm(x.float(), (1024,)))
    weight, bias = nn.Parameter(torch.ones(512)), nn.Parameter(torch.zeros(512))
    return (LayerNorm(weight, bias, 1e-5, ROW_2D)(own(x)) - expected).abs().max().item()


def test_layer_norm_does_not_overflow_in_half() -> None:
    assert max(rank["error in half"] for rank in on_square()) < 1e-3


def product_under_autocast() -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        weight, bias = nn.Parameter(torch.ones(WIDTH // 2, WIDTH // 2)), nn.Parameter(torch.zeros(WIDTH // 2))
        return Linear2D(weight, bias)(torch.ones(2, WIDTH // 2, dtype=torch.bfloat16)).detach()


def test_products_under_autocast_on_a_cpu() -> None:
    for rank in on_square():
        assert torch.equal(rank["product"], torch.full((2, WIDTH // 2), WIDTH, dtype=torch.bfloat16))


def count_collectives() -> int:
    """Count the collectives of a layer norm and a linear layer, forward and backward."""
    half = WIDTH // 2
    ones = [nn.Parameter(torch.ones(shape)) for shape in (half, half, (half, half), half)]
    layers = nn.Sequential(LayerNorm(*ones[:2], 1e-6, ROW_2D), Linear2D(*ones[2:]))
    with Traffic() as traffic:
        layers(torch.randn(2, half, requires_grad=True)).sum().backward()
    return traffic.calls.total()


def test_no_more_collectives_than_needed() -> None:
    """SUMMA's 3 products take q = 2 broadcasts or reductions of 2 operands each, 12; the layer norm takes 2."""
    assert [rank["collectives"] for rank in on_square()] == [14] * 4  # upstream's layers: 22
