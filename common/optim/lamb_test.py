"""LAMB against Colossal-AI's and timm's."""

import math

import pytest
import torch
from timm.optim.lamb import Lamb as TimmLamb
from torch import nn
from torch.optim import Optimizer

from common.engine.upstream import UpstreamLamb
from common.optim.lamb import Lamb

SHAPES = [(64, 48), (48,), (3, 5, 7), (9,), (33, 70)]


def two_groups() -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in SHAPES]
    params[0].data *= 20  # its trust ratio is above 1
    params[1].data.zero_()  # a zero tensor has no trust ratio
    return [
        {"params": params[:3]},
        {"params": params[3:], "weight_decay": 0.0},
    ]


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    result = []
    for group in optimizer.param_groups:
        result += group["params"]
    return result


def set_gradients(params: list[nn.Parameter], step: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = scale * torch.randn(p.shape, generator=generator)
    if step == 0:
        params[3].grad.zero_()  # nor has a tensor with a zero direction


@pytest.mark.parametrize("scale", [1e-4, 1.0])  # below and above the clipping threshold
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        (
            {"variant": "colossalai"},
            None,
        ),
        (
            {"variant": "deepspeed", "trust_range": (0, 10)},
            {"eps": 1e-8, "always_adapt": True, "max_grad_norm": None},
        ),
        (
            {"always_adapt": True},
            {"always_adapt": True},
        ),
        (
            {"trust_range": (0.0, 1.0)},
            {"trust_clip": True},
        ),
        (
            {"bias_correction": False},
            {"bias_correction": False},
        ),
        (
            {"max_grad_norm": math.inf},
            {"max_grad_norm": None},
        ),
    ],
)
def test_variants_and_options_are_those_of_colossalai_and_timm(ours, theirs, scale):
    """Both take ten steps on the same gradients; the parameters have to agree after every step."""
    common = {"lr": 1.8e-2, "weight_decay": 0.1}
    options = {"variant": "apex" if scale == 1 else "timm"} | ours
    mine = Lamb(two_groups(), **common, **options)
    if theirs is None:
        reference = UpstreamLamb(two_groups(), **common)
    else:
        reference = TimmLamb(two_groups(), **common, **theirs)
    my_params = params_of(mine)
    reference_params = params_of(reference)
    for step in range(10):
        set_gradients(my_params, step, scale)
        set_gradients(reference_params, step, scale)
        mine.step()
        reference.step()
        for found, expected in zip(my_params, reference_params, strict=True):
            difference = (found - expected).abs().max()
            assert difference <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize(("size", "ratio"), [(1e-6, 0.01), (2.0, 2.0), (100.0, 10.0)])
def test_deepspeeds_trust_ratio_is_within_a_hundredth_and_ten(size, ratio):
    """Each step in the direction of 1s is as long as ``ratio`` of the weight's ``size``."""
    param = nn.Parameter(torch.full((4,), size))
    param.grad = torch.ones(4)
    optimizer = Lamb([param], lr=0.5, variant="deepspeed")
    optimizer.step()
    expected = torch.full((4,), size - 0.5 * ratio)
    torch.testing.assert_close(param.detach(), expected)
