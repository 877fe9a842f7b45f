"""LAMB against Colossal-AI's and timm's."""

import math
from functools import partial

import pytest
import torch
from timm.optim.lamb import Lamb as TimmLamb
from torch import nn

from common.engine.upstream import UpstreamLamb
from common.optim.lamb import Lamb

SHAPES = [(64, 48), (48,), (3, 5, 7), (9,), (33, 70)]


def two_groups() -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in SHAPES]
    params[0].data *= 20  # its trust ratio is above 1
    params[1].data.zero_()  # a zero tensor has no trust ratio
    return [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}]


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
        ({"variant": "colossalai"}, None),
        (
            {"variant": "deepspeed", "trust_range": (0, 10)},
            {"eps": 1e-8, "always_adapt": True, "max_grad_norm": None},
        ),
        ({"always_adapt": True}, {"always_adapt": True}),
        ({"trust_range": (0.0, 1.0)}, {"trust_clip": True}),
        ({"bias_correction": False}, {"bias_correction": False}),
        ({"max_grad_norm": math.inf}, {"max_grad_norm": None}),
    ],
)
def test_variants_and_options_are_those_of_colossalai_and_timm(ours, theirs, scale):
    """Both take ten steps on the same gradients; the parameters have to agree after every step."""
    common = {"lr": 1.8e-2, "weight_decay": 0.1}
    variant = {"variant": "apex" if scale == 1 else "timm"}
    build = UpstreamLamb if theirs is None else partial(TimmLamb, **theirs)
    pair = Lamb(two_groups(), **common, **variant | ours), build(two_groups(), **common)
    for step in range(10):
        for optimizer in pair:
            set_gradients(
                [p for group in optimizer.param_groups for p in group["params"]], step, scale
            )
            optimizer.step()
        for mine, other in zip(*(optimizer.param_groups for optimizer in pair), strict=True):
            for a, b in zip(mine["params"], other["params"], strict=True):
                assert (a - b).abs().max() <= 1e-6 * b.abs().max()


@pytest.mark.parametrize(("size", "ratio"), [(1e-6, 0.01), (2.0, 2.0), (100.0, 10.0)])
def test_deepspeeds_trust_ratio_is_within_a_hundredth_and_ten(size, ratio):
    """Each step in the direction of 1s is as long as ``ratio`` of the weight's ``size``."""
    param = nn.Parameter(torch.full((4,), size))
    param.grad = torch.ones(4)
    Lamb([param], lr=0.5, variant="deepspeed").step()
    torch.testing.assert_close(param.detach(), torch.full((4,), size - 0.5 * ratio))
