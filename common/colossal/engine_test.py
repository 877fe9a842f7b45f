"""What crosses ranks in a step of the engine; parity_test.py and precision_test.py have what it computes."""

import torch
from torch import nn

from common.colossal import Engine, gpc, initialize
from common.planner.counters import Traffic
from common.testing.ranks import launched, run_ranks


def build_engine(calls: list[torch.Tensor]) -> Engine:
    """Build a model with weights that differ between ranks, and a gradient hook registered before they are equal."""
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, gpc.get_global_rank())
    model.weight.register_hook(calls.append)
    engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), nn.MSELoss())
    assert not model.weight.any()  # those of rank 0
    return engine


def count() -> list[tuple[int, int]]:
    """Return for DDP, with a static graph too, and for handlers the all-reduces and the calls of a hook in 2 steps."""
    counts = []
    with launched(gradient_accumulation=4):
        handlers = [{"type": "DataParallelGradientHandler"}]
        for keys in ({}, {"torch_ddp": {"static_graph": True}}, {"gradient_handler": handlers}):
            gpc.config.update(keys)
            calls: list[torch.Tensor] = []
            engine = build_engine(calls)
            with Traffic() as traffic:
                for _ in range(8):
                    engine.zero_grad()
                    engine.execute_schedule(iter([(torch.ones(2, 3), torch.ones(2, 1))]))
                    engine.step()
            counts.append((traffic.calls["all_reduce", (0, 1)], len(calls)))
    return counts


def test_gradients_cross_ranks_once_per_step_and_hooks_survive_synchronization() -> None:
    assert run_ranks(2, count) == [[(2, 8), (4, 8), (2, 8)]] * 2  # the first pass reduces too, and what it used
