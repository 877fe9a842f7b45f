"""A sharded model in use: masks, recomputed activations, and layer norm.

parity_test.py and amp_test.py compare whole models.
"""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from common.engine.tensor_parallel.layers import ShardedLinear, ShardedNorm
from common.engine.tensor_parallel.layout import LAYOUTS, Sharding
from common.engine.tensor_parallel.sharding import build_reduce_norms, global_grad_norm, grad_norms
from common.engine.upstream import ParallelMode, gpc
from common.engine.zero import shard_model
from common.testing.parity_cases import (
    CASES,
    MODERN,
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
    _, config = CASES[case]
    mode = config["parallel"]["tensor"]["mode"]
    layout = LAYOUTS[mode]
    with launched(**config):
        # the ranks of data, samples and channels
        position = []
        for group in (ParallelMode.DATA, layout.samples, layout.channels):
            position.append(gpc.get_local_rank(group) if group else 0)
        return {
            "position": position,
            "masks": masks(),
            "recomputed": recomputed_gradients(),
        }


def masks() -> dict[str, Tensor]:
    """Return what dropout keeps of the residual stream and the MLP, and drop_path of samples."""
    model, _, engine = build_engine("sgd", dropout=0.5, drop_path=0.5)
    engine.train()
    block = model.blocks[1]
    layers = {
        "residual": model.dropout,
        "hidden": block.mlp.drop1,
        "again": block.mlp.drop1,
        "output": block.mlp.drop2,
        "drop_path": block.drop_path,
    }
    ones = torch.ones(64, 2, 4)
    return {name: layer(ones).bool() for name, layer in layers.items()}


def recomputed_gradients() -> list[list[Tensor]]:
    """Return the gradients of a sharded model with dropout, without and with recomputed blocks."""
    gradients = []
    passes = []
    images, labels = next(iter(micro_batches()))
    for checkpointed in (False, True):
        full = build_tiny_model(dropout=0.2, drop_path=0.2, activation_checkpoint=checkpointed)
        model = shard_model(full)
        model.blocks[0].register_forward_pre_hook(lambda *_: passes.append(1))
        torch.manual_seed(5)
        loss = blended_loss(model(images), **labels)
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert len(passes) == 3  # one recomputed
    return gradients


@in_every_mode
def test_masks_are_drawn_anew_and_agree_where_activations_do(case):
    answers = on_ranks(case)
    for one in answers:
        drawn = one["masks"]
        assert 0.4 < drawn["hidden"].float().mean() < 0.6
        assert not torch.equal(drawn["hidden"], drawn["again"])
        for other in answers:
            has_same_activations = one["position"] == other["position"]
            has_same_samples = one["position"][:2] == other["position"][:2]
            expected = {
                "residual": has_same_activations,
                "output": has_same_activations,
                "hidden": one is other,
                "drop_path": has_same_samples,
            }
            for name, agrees in expected.items():
                is_equal = torch.equal(drawn[name], other["masks"][name])
                assert is_equal == agrees, name


@in_every_mode
def test_recomputed_activations_have_the_same_masks(case):
    for answer in on_ranks(case):
        plain, recomputed = answer["recomputed"]
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [nn.LayerNorm(1024), nn.RMSNorm(1024, eps=1e-5)])
def test_norms_do_not_overflow_in_half(norm):
    """100^2 overflows in half precision, 0.001^2 is below the epsilon."""
    torch.manual_seed(0)
    deviations = torch.tensor([[100.0], [0.001]])
    x = (deviations * torch.randn(2, 1024)).half()
    bias = getattr(norm, "bias", None)
    with launched():
        sharded = ShardedNorm(norm.weight, bias, norm.eps, ParallelMode.DATA)
        output = sharded(x)
    torch.testing.assert_close(output, norm(x.float()), rtol=0, atol=1e-3)


def epsilons(arguments: dict[str, str]) -> set[float]:
    _, config = CASES["2d-4"]
    with launched(**config):
        model = shard_model(build_tiny_model(**arguments))
        return {layer.eps for layer in model.modules() if isinstance(layer, ShardedNorm)}


@pytest.mark.parametrize("arguments", [{}, MODERN])
def test_norms_keep_their_epsilon(arguments):
    """Beside activations of 1 the default, 1e-5, is within what parity_test allows."""
    for found in run_ranks(4, epsilons, arguments):
        assert found == {1e-6}


class Product(ShardedLinear):
    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_in_autocasts_dtype(dtype):
    weight = nn.Parameter(torch.ones(4, 3))
    bias = nn.Parameter(torch.zeros(3))
    layer = Product(weight, bias)
    x = torch.ones(2, 4)
    with torch.autocast("cpu", dtype):
        assert layer(x).dtype == dtype
    assert layer(x).dtype == torch.float32


def test_the_shares_of_norms_are_copied_to_the_device_once(monkeypatch):
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    for parameter in parameters:
        parameter.sharding = Sharding()
    make = mock.Mock(wraps=torch.tensor)
    monkeypatch.setattr(torch, "tensor", make)
    with launched():
        reduce_norms = build_reduce_norms()
        for _ in range(2):
            reduced = reduce_norms(torch.ones(2, 3), parameters)
            assert reduced.tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    assert make.call_count == 1


def test_the_norm_of_gradients_in_half_precision_may_exceed_its_range():
    """float16 ends at 65,504."""
    parameter = nn.Parameter(torch.zeros(100, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 20_000)
    norm = global_grad_norm(grad_norms([parameter]))
    assert norm.item() == pytest.approx(200_000)
