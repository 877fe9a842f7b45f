"""What crosses ranks in a step of the engine; parity_test.py and precision_test.py have what it computes."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.colossal import Engine, gpc, initialize
from common.testing.ranks import launched, run_ranks

HANDLER = [{"type": "DataParallelGradientHandler"}]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model with weights that differ between ranks."""
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, gpc.get_global_rank())
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def build_engine() -> Engine:
    model, optimizer = build()
    engine, *_ = initialize(model, optimizer, nn.MSELoss())
    assert not model.weight.any()  # those of rank 0
    return engine


def run_two_steps(engine: Engine) -> None:
    for _ in range(8):
        engine.zero_grad()
        engine.execute_schedule(iter([(torch.ones(2, 3), torch.ones(2, 1))]))
        engine.step()


def count_all_reduces() -> int:
    """Count how often DDP reduces a gradient bucket in 2 steps of 4 micro-batches."""
    buckets, engine = [], build_engine()

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buckets.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    engine.model.register_comm_hook(None, hook)
    run_two_steps(engine)
    return len(buckets)


def count_handler_calls() -> int:
    calls, engine = [], build_engine()
    with mock.patch.object(dist, "all_reduce", lambda *args, **_: calls.append(args)):
        run_two_steps(engine)
    return len(calls)


def count_hook_calls() -> int:
    """Count the calls of a gradient hook that was registered before the ranks' weights were synchronized."""
    (model, optimizer), calls = build(), []
    model.weight.register_hook(calls.append)
    initialize(model, optimizer, nn.MSELoss())
    model(torch.ones(2, 3)).sum().backward()
    return len(calls)


def count() -> list[int]:
    """Return how often gradients cross ranks by DDP and by handlers, and how often a hook is called."""
    with launched(gradient_accumulation=4):
        by_ddp = count_all_reduces()
        gpc.config["gradient_handler"] = HANDLER
        return [by_ddp, count_handler_calls(), count_hook_calls()]


def test_gradients_cross_ranks_once_per_step_and_hooks_survive_synchronization() -> None:
    assert run_ranks(2, count) == [[2, 2, 1]] * 2
