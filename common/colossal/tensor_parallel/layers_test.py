"""The sharded layers' numerical range and traffic; parity_test.py and precision_test.py compare whole models."""

import torch
from torch import nn
from torch.nn import functional as F

from common.colossal import gpc
from common.colossal.tensor_parallel.layers import LayerNorm, Linear2D
from common.colossal.tensor_parallel.layout import ROW_2D
from common.planner.counters import Traffic
from common.testing.parity_cases import CASES
from common.testing.ranks import launched, run_ranks


def layer_norm_error() -> float:
    """Return the largest error of the layer norm in half precision, for a deviation of 100, whose square overflows."""

    def own(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(2, dim=-1)[gpc.get_local_rank(ROW_2D)]

    torch.manual_seed(0)
    x = 100 * torch.randn(4, 1024).half()
    expected = own(F.layer_norm(x.float(), (1024,)))
    weight, bias = nn.Parameter(torch.ones(512)), nn.Parameter(torch.zeros(512))
    return (LayerNorm(weight, bias, 1e-5, ROW_2D)(own(x)) - expected).abs().max().item()


def count_collectives() -> int:
    """Count the collectives of a layer norm and a linear layer, forward and backward."""
    ones = [nn.Parameter(torch.ones(shape)) for shape in (4, 4, (4, 4), 4)]
    layers = nn.Sequential(LayerNorm(*ones[:2], 1e-6, ROW_2D), Linear2D(*ones[2:]))
    with Traffic() as traffic:
        layers(torch.randn(2, 4, requires_grad=True)).sum().backward()
    return traffic.calls.total()


def look_around() -> tuple[float, int]:
    with launched(**CASES["2d-4"][1]):
        return layer_norm_error(), count_collectives()


def test_layer_norm_does_not_overflow_in_half_and_nothing_is_sent_twice() -> None:
    """SUMMA's 3 products take q = 2 broadcasts or reductions of 2 operands each, 12; the layer norm takes 2."""
    for error, collectives in run_ranks(4, look_around):
        assert error < 1e-3
        assert collectives == 14  # upstream's layers: 22
