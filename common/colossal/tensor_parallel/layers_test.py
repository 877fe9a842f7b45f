"""The layers compared with PyTorch's, and the upstream faults that they avoid."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from colossalai.legacy.context.random.seed_manager import SeedManager
from colossalai.legacy.nn.layer.parallel_2d import LayerNorm2D
from colossalai.legacy.nn.layer.parallel_2d import Linear2D as UpstreamLinear2D
from colossalai.legacy.nn.layer.parallel_3d import Classifier3D
from torch import Tensor, nn
from torch.nn import functional as F

from common.colossal import gpc
from common.colossal.tensor_parallel.layers import LayerNorm, Linear2D
from common.colossal.tensor_parallel.layout import ROW_2D
from common.estimate.traffic import Traffic
from common.testing.parity_cases import CASES
from common.testing.ranks import launched, run_ranks

WIDTH = 8
WITHOUT_SEEDS = mock.patch.object(SeedManager, "set_mode")  # upstream's, which fail without a GPU


@functools.cache
def on_square() -> list[dict[str, Any]]:
    """Return what each of the four ranks of a 2d launch finds."""
    return run_ranks(4, look_around)


def look_around() -> dict[str, Any]:
    with launched(parallel=CASES["2d-4"][1]), WITHOUT_SEEDS:
        return {
            "layer norms": {offset: layer_norms(offset) for offset in (0.0, 100.0)},
            "errors in half": layer_norm_errors(),
            "products": products_under_autocast(),
            "collectives": [count_collectives(upstream) for upstream in (False, True)],
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


def layer_norm_errors() -> tuple[float, ...]:
    """Return the largest error of our layer norm and of upstream's in half precision, for a deviation of 100."""
    torch.manual_seed(0)
    x = 100 * torch.randn(4, 1024).half()
    expected = own(F.layer_norm(x.float(), (1024,)))
    weight, bias = nn.Parameter(torch.ones(512)), nn.Parameter(torch.zeros(512))
    ours = LayerNorm(weight, bias, 1e-5, ROW_2D)(own(x))
    upstreams = LayerNorm2D(1024)(own(x))
    return tuple((output - expected).abs().max().item() for output in (ours, upstreams))


def test_upstreams_layer_norm_overflows_in_half() -> None:
    for rank in on_square():
        ours, upstreams = rank["errors in half"]
        assert ours < 1e-3
        assert not upstreams < 0.5


def products_under_autocast() -> tuple[Tensor, str]:
    """Return our product under bfloat16 autocast, and the error of upstream's layer."""
    with torch.autocast("cpu", torch.bfloat16):
        weight, bias = nn.Parameter(torch.ones(WIDTH // 2, WIDTH // 2)), nn.Parameter(torch.zeros(WIDTH // 2))
        x = torch.ones(2, WIDTH // 2, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError) as caught:
            UpstreamLinear2D(WIDTH, WIDTH)(x)
        return Linear2D(weight, bias)(x).detach(), str(caught.value)


def test_upstreams_products_fail_under_autocast_on_a_cpu() -> None:
    for rank in on_square():
        product, message = rank["products"]
        assert torch.equal(product, torch.full((2, WIDTH // 2), WIDTH, dtype=torch.bfloat16))
        assert "dtype" in message


def count_collectives(upstream: bool) -> int:
    """Count the collectives of a layer norm and a linear layer, forward and backward."""
    half = WIDTH // 2
    if upstream:
        layers = nn.Sequential(LayerNorm2D(WIDTH), UpstreamLinear2D(WIDTH, WIDTH))
    else:
        ones = [nn.Parameter(torch.ones(shape)) for shape in (half, half, (half, half), half)]
        layers = nn.Sequential(LayerNorm(*ones[:2], 1e-6, ROW_2D), Linear2D(*ones[2:]))
    with Traffic() as traffic:
        layers(torch.randn(2, half, requires_grad=True)).sum().backward()
    return traffic.calls.total()


def test_fewer_collectives_than_upstreams() -> None:
    """SUMMA's 3 products take q = 2 broadcasts or reductions of 2 operands each, 12; the layer norm takes 2."""
    assert [rank["collectives"] for rank in on_square()] == [[14, 22]] * 4


def classifier_backward() -> str:
    with launched(parallel=CASES["3d-8"][1]), WITHOUT_SEEDS:
        layer = Classifier3D(WIDTH, 4)
        try:
            layer(torch.ones(1, WIDTH // 2)).sum().backward()
        except AttributeError as error:
            return str(error)
        return ""


def test_upstreams_3d_classifier_has_no_gradient_off_the_diagonal() -> None:
    messages = run_ranks(8, classifier_backward)
    assert sum("NoneType" in message for message in messages) == 4
