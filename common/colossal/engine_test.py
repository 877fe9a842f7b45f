"""The engine set up by ``initialize``: ranks and micro-batches together do what one process does with one batch."""

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from colossalai.interface import OptimizerWrapper
from colossalai.legacy.engine import Engine as UpstreamEngine
from colossalai.legacy.engine.gradient_accumulation import GradAccumOptimizer
from colossalai.legacy.utils import sync_model_param
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.colossal import AMP_TYPE, ParallelMode, gpc, initialize
from common.errors import UserError
from common.testing.ranks import launched, run_ranks

STEPS, MICRO_BATCH, ACCUMULATION, RANKS = 3, 2, 2, 2
GLOBAL_BATCH = MICRO_BATCH * ACCUMULATION * RANKS
MAX_NORM = 0.3
HANDLER = {"gradient_handler": [{"type": "DataParallelGradientHandler"}]}


def build_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)


def global_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    shape = (STEPS, GLOBAL_BATCH)
    inputs, labels = torch.randn(*shape, 5, generator=generator), torch.randint(4, shape, generator=generator)
    return list(zip(inputs, labels, strict=True))


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def train_in_one_process(dtype: torch.dtype | None) -> tuple[Tensor, list[float]]:
    """Return weights and gradient norms of a plain loop of torch's over whole global batches."""
    model = build_model(0)
    optimizer = build_optimizer(model)
    norms = []
    for inputs, labels in global_batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            logits = model(inputs)
        nn.functional.cross_entropy(logits.float(), labels).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return weights(model), norms


def train_as_rank(config: dict) -> tuple[Tensor, list[float]]:
    """Return the same of this rank's share; ranks start from different weights, of which rank 0's count."""
    with launched(gradient_accumulation=ACCUMULATION, clip_grad_norm=MAX_NORM, **config):
        rank = gpc.get_local_rank(ParallelMode.DATA)
        model = build_model(rank)
        share = [
            (inputs[start : start + MICRO_BATCH], labels[start : start + MICRO_BATCH])
            for inputs, labels in global_batches()
            for start in range(rank * MICRO_BATCH, GLOBAL_BATCH, RANKS * MICRO_BATCH)
        ]
        engine, loader, _, _ = initialize(model, build_optimizer(model), nn.CrossEntropyLoss(), share)
        norms = []
        batches = iter(loader)
        for _ in range(len(loader)):
            engine.zero_grad()
            engine.execute_schedule(batches)
            engine.step()
            if engine.optimizer.accumulated == 0:
                norms.append(engine.optimizer.grad_norm.item())
        return weights(model), norms


@pytest.mark.parametrize(
    ("config", "dtype", "tolerance"),
    [
        ({}, None, 1e-6),
        ({"torch_ddp": {"gradient_as_bucket_view": False}}, None, 1e-6),
        (HANDLER, None, 1e-6),
        ({"fp16": {"mode": AMP_TYPE.TORCH, "dtype": "bfloat16"}}, torch.bfloat16, 1e-2),
        ({"fp16": {"mode": AMP_TYPE.TORCH, "dtype": "float16", "init_scale": 1024.0}}, torch.float16, 1e-3),
    ],
)
def test_two_ranks_with_accumulation_equal_one_process(
    config: dict, dtype: torch.dtype | None, tolerance: float
) -> None:
    expected, expected_norms = train_in_one_process(dtype)
    results = run_ranks(RANKS, train_as_rank, config)
    assert torch.equal(results[0][0], results[1][0])
    assert min(expected_norms) > MAX_NORM  # so that clipping was needed
    for result, norms in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=tolerance)
        assert norms == pytest.approx(expected_norms, rel=tolerance)


def count_all_reduces(upstream: bool) -> int:
    """Count how often DDP reduces a gradient bucket in 2 steps of 4 micro-batches."""
    model, buckets = nn.Linear(3, 1), []
    if upstream:
        ddp = DistributedDataParallel(model)
        optimizer = GradAccumOptimizer(OptimizerWrapper(build_optimizer(model)), 4, ddp)
        engine = UpstreamEngine(ddp, optimizer, nn.MSELoss(), clip_grad_norm=1e9)
    else:
        engine, *_ = initialize(model, build_optimizer(model), nn.MSELoss())

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buckets.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    engine.model.register_comm_hook(None, hook)
    run_two_steps(engine)
    return len(buckets)


def run_two_steps(engine: UpstreamEngine) -> None:
    for _ in range(8):
        engine.zero_grad()
        engine.execute_schedule(iter([(torch.ones(2, 3), torch.ones(2, 1))]))
        engine.step()


def count_handler_calls() -> int:
    model, calls = nn.Linear(3, 1), []
    engine, *_ = initialize(model, build_optimizer(model), nn.MSELoss())
    with mock.patch.object(dist, "all_reduce", lambda *args, **_: calls.append(args)):
        run_two_steps(engine)
    return len(calls)


def count_hook_calls(upstream: bool) -> int:
    """Count the calls of a gradient hook that was registered before the ranks' weights were synchronized."""
    model, calls = nn.Linear(3, 1), []
    model.weight.register_hook(calls.append)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "c10d..broadcast_")
        if upstream:
            sync_model_param(model, ParallelMode.DATA)
        else:
            initialize(model, build_optimizer(model), nn.MSELoss())
        model(torch.ones(2, 3)).sum().backward()
    return len(calls)


def count() -> list[int]:
    """Return how often gradients cross ranks by DDP (ours, upstream's) and handlers, and a hook's calls (the same)."""
    with launched(gradient_accumulation=4):
        by_ddp = count_all_reduces(False), count_all_reduces(True)
        gpc.config.update(HANDLER)
        return [*by_ddp, count_handler_calls(), count_hook_calls(False), count_hook_calls(True)]


def test_gradients_cross_ranks_once_per_step_and_hooks_survive_synchronization() -> None:
    assert run_ranks(2, count) == [[2, 8, 2, 1, 0]] * 2


def test_zero_is_refused() -> None:
    model = build_model(0)
    with launched(zero={"stage": 1}), pytest.raises(UserError, match="zero is not supported"):
        initialize(model, build_optimizer(model))
