"""The layers beside what they replace, and upstream's faults that are the reason for them."""

from typing import Any

import pytest
import torch
from colossalai.legacy.context.random import seed
from colossalai.legacy.nn.layer.parallel_2d import LayerNorm2D
from colossalai.legacy.nn.layer.parallel_2d import Linear2D as UpstreamLinear2D
from colossalai.legacy.nn.layer.parallel_3d import Classifier3D
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from common.colossal import ParallelMode, gpc
from common.colossal.tensor_parallel.layers import LayerNorm, Linear2D, OwnRandom
from common.colossal.tensor_parallel.layout import ROW_2D
from common.testing.parity_cases import CASES
from common.testing.ranks import launched, run_ranks

WIDTH = 8
GLOO_2D = {"parallel": CASES["2d-4"][1]}


def own(x: Tensor) -> Tensor:
    """Return this rank's channels of x [..., WIDTH]."""
    return x.chunk(2, dim=-1)[gpc.get_local_rank(ROW_2D)].clone()


def layer_norms(offset: float) -> list[tuple[Tensor, Tensor]]:
    """Return (ours, PyTorch's): output and the gradients of input, weight and bias; inputs lie around ``offset``."""
    with launched(**GLOO_2D):
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
    for pairs in run_ranks(4, layer_norms, offset):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 if offset else 1e-6)


def layer_norm_errors() -> tuple[float, float]:
    """Return the largest error of our layer norm and of upstream's in half precision, of inputs of deviation 100."""
    with launched(**GLOO_2D):
        torch.manual_seed(0)
        x = 100 * torch.randn(4, 1024).half()
        expected = own(F.layer_norm(x.float(), (1024,)))
        weight, bias = nn.Parameter(torch.ones(512)), nn.Parameter(torch.zeros(512))
        ours = LayerNorm(weight, bias, 1e-5, ROW_2D)(own(x))
        upstreams = LayerNorm2D(1024)(own(x))
        return tuple((output - expected).abs().max().item() for output in (ours, upstreams))


def test_upstreams_layer_norm_overflows_in_half() -> None:
    for ours, upstreams in run_ranks(4, layer_norm_errors):
        assert ours < 1e-3
        assert not upstreams < 0.5


def products_under_autocast() -> tuple[torch.dtype, str]:
    """Return the type of our output under bfloat16 autocast, and what upstream's layer says to it."""
    with launched(**GLOO_2D), torch.autocast("cpu", torch.bfloat16):
        weight, bias = nn.Parameter(torch.ones(WIDTH // 2, WIDTH // 2)), nn.Parameter(torch.zeros(WIDTH // 2))
        x = torch.ones(2, WIDTH // 2, dtype=torch.bfloat16)
        output = Linear2D(weight, bias)(x)
        assert torch.equal(output, torch.full_like(output, WIDTH))
        with pytest.raises(RuntimeError) as caught:
            UpstreamLinear2D(WIDTH, WIDTH)(x)
        return output.dtype, str(caught.value)


def test_upstreams_products_fail_under_autocast_on_a_cpu() -> None:
    for dtype, message in run_ranks(4, products_under_autocast):
        assert dtype == torch.bfloat16
        assert "dtype" in message


def classifier_backward() -> str:
    with launched(parallel=CASES["3d-8"][1]):
        layer = Classifier3D(WIDTH, 4)
        try:
            layer(torch.ones(1, WIDTH // 2)).sum().backward()
        except AttributeError as error:
            return str(error)
        return ""


def test_upstreams_3d_classifier_has_no_gradient_off_the_diagonal() -> None:
    """Its backward pass ends on those ranks whose input rank is not their output rank."""
    messages = run_ranks(8, classifier_backward)
    assert sum("NoneType" in message for message in messages) == 4


def dropped_twice(own_state: bool) -> list[Tensor]:
    """Return the masks that a checkpointed dropout of this rank's own draws, forward and again in the backward pass."""
    masks = []

    def drop(x: Tensor) -> Tensor:
        if own_state:
            y = OwnRandom(nn.Dropout(0.5), gpc.get_local_rank(ParallelMode.TENSOR))(x)
        else:
            with seed(ParallelMode.TENSOR):
                y = F.dropout(x, 0.5)
        masks.append(y.detach().bool())
        return y * y

    with launched(**GLOO_2D):
        checkpoint(drop, torch.ones(64, requires_grad=True), use_reentrant=False).sum().backward()
    return masks


def test_recomputed_masks_are_the_same() -> None:
    assert all(torch.equal(*masks) for masks in run_ranks(4, dropped_twice, True))


def test_upstreams_random_states_are_not_restored() -> None:
    assert not any(torch.equal(*masks) for masks in run_ranks(4, dropped_twice, False))


class Collectives(TorchDispatchMode):
    """Count what is sent."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def count_collectives(upstream: bool) -> int:
    """Count the collectives of a layer norm and a linear layer in 2d, forward and backward."""
    with launched(**GLOO_2D):
        half = WIDTH // 2
        if upstream:
            layers = nn.Sequential(LayerNorm2D(WIDTH), UpstreamLinear2D(WIDTH, WIDTH))
        else:
            ones = [nn.Parameter(torch.ones(shape)) for shape in (half, half, (half, half), half)]
            layers = nn.Sequential(LayerNorm(*ones[:2], 1e-6, ROW_2D), Linear2D(*ones[2:]))
        with Collectives() as collectives:
            layers(torch.randn(2, half, requires_grad=True)).sum().backward()
        return collectives.count


def test_fewer_collectives_than_upstreams() -> None:
    """SUMMA's 3 products take q = 2 broadcasts or reductions of 2 operands each, 12; the layer norm takes 2."""
    assert run_ranks(4, count_collectives, False) == [14] * 4
    assert run_ranks(4, count_collectives, True) == [22] * 4
