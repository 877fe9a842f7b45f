"""A sharded model in use: what each rank holds, masks, recomputed activations, range of its layer
norm.

parity_test.py and amp_test.py compare whole models.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.engine.tensor_parallel.layers import LayerNorm
from common.engine.tensor_parallel.layout import LAYOUTS, ROW_2D, describe_tensor_parallel
from common.engine.upstream import ParallelMode, gpc
from common.engine.zero import shard_model
from common.testing.parity_cases import (
    CASES,
    blended_loss,
    build_engine,
    build_tiny_model,
    micro_batches,
)
from common.testing.ranks import launched, run_ranks

in_every_mode = pytest.mark.parametrize("case", ["1d-2", "2d-4", "2.5d-8", "3d-8", "dp2 x 1d-2"])


@functools.cache
def on_ranks(case: str) -> list[dict[str, Any]]:
    """Return what each rank of ``case`` finds, in one fork per mode."""
    return run_ranks(CASES[case][0], look_around, case)


def look_around(case: str) -> dict[str, Any]:
    config = CASES[case][1]
    with launched(**config):
        layout = LAYOUTS[config["parallel"]["tensor"]["mode"]]
        groups = (ParallelMode.DATA, layout.samples, layout.channels)
        return {
            "position": tuple(gpc.get_local_rank(group) if group else 0 for group in groups),
            "holds": holds(),
            "masks": masks(),
            "recomputed": recomputed_gradients(),
        }


def holds() -> tuple[int, ...]:
    """Return how many samples, channels, heads of 8 channels and parameters this rank has of 16
    samples.
    """
    model, shapes = shard_model(build_tiny_model()), []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    model(torch.randn(16, 3, 16, 16))
    heads = len(model.blocks[0].attn.qkv.bias) // 24
    return shapes[0][0], shapes[0][2], heads, sum(p.numel() for p in model.parameters())


def masks() -> dict[str, Tensor]:
    """Return what dropout keeps of the residual stream and of the MLP, and which samples drop_path
    keeps, twice.
    """
    model, _, engine = build_engine("sgd", dropout=0.5, drop_path=0.5)
    engine.train()
    block, inputs = model.blocks[1], torch.ones(64, 2, 4)
    layers = {"residual": model.dropout, "hidden": block.mlp.drop1, "again": block.mlp.drop1}
    layers |= {"output": block.mlp.drop2, "drop_path": block.drop_path}
    return {name: layer(inputs).bool() for name, layer in layers.items()}


def recomputed_gradients() -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients with dropout of a plain sharded model, and of one that recomputes its
    blocks.
    """
    answers, passes = [], []
    images, labels = next(iter(micro_batches()))
    for checkpointed in (False, True):
        model = shard_model(
            build_tiny_model(dropout=0.2, drop_path=0.2, activation_checkpoint=checkpointed)
        )
        model.blocks[0].register_forward_pre_hook(lambda *_: passes.append(1))
        torch.manual_seed(5)
        blended_loss(model(images), **labels).backward()
        answers.append([parameter.grad for parameter in model.parameters()])
    assert len(passes) == 3  # one recomputed
    return tuple(answers)


@in_every_mode
def test_ranks_hold_what_is_announced(case):
    line = describe_tensor_parallel(CASES[case][1]["parallel"], full := build_tiny_model(), 16)
    parameters = sum(param.numel() for param in full.parameters())
    words = "{} of 16 samples, {} of 32 channels between blocks, {} of 4 heads, {:,} of "
    for answer in on_ranks(case):
        assert line == f"{words.format(*answer['holds'])}{parameters:,} parameters"


@in_every_mode
def test_masks_are_drawn_anew_and_agree_where_activations_do(case):
    answers = on_ranks(case)
    for one in answers:
        assert 0.4 < one["masks"]["hidden"].float().mean() < 0.6
        assert not torch.equal(one["masks"]["hidden"], one["masks"]["again"])
        for other in answers:
            same_position, same_samples = (
                one["position"] == other["position"],
                one["position"][:2] == other["position"][:2],
            )
            expected = {
                "residual": same_position,
                "output": same_position,
                "hidden": one is other,
                "drop_path": same_samples,
            }
            assert {
                name: torch.equal(one["masks"][name], other["masks"][name]) for name in expected
            } == expected


@in_every_mode
def test_recomputed_activations_have_the_same_masks(case):
    for answer in on_ranks(case):
        for plain, recomputed in zip(*answer["recomputed"], strict=True):
            torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-6)


def layer_norm_error() -> float:
    """Return the largest error of the layer norm in half precision: 100^2 overflows, 0.001^2 is
    below the epsilon.
    """
    torch.manual_seed(0)
    x = (torch.tensor([[100.0], [0.001]]) * torch.randn(2, 1024)).half()
    with launched(**CASES["2d-4"][1]):
        own, expected = (
            full.chunk(2, dim=-1)[gpc.get_local_rank(ROW_2D)]
            for full in (x, F.layer_norm(x.float(), (1024,)))
        )
        weight, bias = nn.Parameter(torch.ones(512)), nn.Parameter(torch.zeros(512))
        return (LayerNorm(weight, bias, 1e-5, ROW_2D)(own) - expected).abs().max().item()


def test_layer_norm_does_not_overflow_in_half():
    assert max(run_ranks(4, layer_norm_error)) < 1e-3
