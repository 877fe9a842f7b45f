"""What a slow test of parity_test.py must see: a forgotten wait, and two orders."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from common.testing.late_collectives import Entry, late_collectives, stall
from common.testing.ranks import launched, run_ranks


def reduce(waits: bool) -> tuple[list[float], int, int]:
    """Return the sum of a tensor over ranks, and the number of collectives that are open."""
    with launched(), late_collectives() as ledger:
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        if waits:
            work.wait()
        return x.tolist(), ledger.pending, ledger.asynchronous


def test_a_result_is_there_after_its_wait():
    assert run_ranks(2, reduce, True) == [([2.0, 2.0], 0, 1)] * 2
    for values, pending, _ in run_ranks(2, reduce, False):
        assert pending == 1
        assert torch.tensor(values).isnan().all()


def orders(start: Callable[[Tensor, list], None]) -> list:
    with launched(), late_collectives() as ledger:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        start(torch.ones(2), groups)
        dist.barrier()
        return ledger.entries


def same_order(x: Tensor, groups: list) -> None:
    for group in groups:
        dist.all_reduce(x, group=group)


def two_orders(x: Tensor, groups: list) -> None:
    """Start collectives of two groups in the order of the rank: gloo does not mind."""
    rank = dist.get_rank()
    works = [dist.all_reduce(x.clone(), group=groups[i ^ rank], async_op=True) for i in range(2)]
    for work in works:
        work.wait()


@pytest.mark.parametrize(("start", "stalls"), [(same_order, False), (two_orders, True)])
def test_two_orders_would_stall(start, stalls):
    assert (stall(run_ranks(2, orders, start)) is not None) == stalls


def entry(group: str, ranks: str, numel: int = 2, dtype: str = "torch.float32") -> Entry:
    return "allreduce_", group, tuple(map(int, ranks)), dtype, numel, ()


SUM = entry("0", "01")
ROWS = entry("a", "01"), entry("b", "23")
COLUMNS = entry("c", "02"), entry("d", "13")


@pytest.mark.parametrize(
    ("ledgers", "waiting"),
    [
        ([[SUM, SUM], [SUM, SUM]], ()),
        ([[SUM], []], (0,)),
        ([[SUM], [entry("0", "01", numel=3)]], (0, 1)),
        ([[SUM], [entry("0", "01", dtype="torch.float16")]], (0, 1)),
        # A square: no two ranks have two groups in common.
        ([[ROWS[i // 2], COLUMNS[i % 2]] for i in range(4)], ()),
        (
            [
                [ROWS[0], COLUMNS[0]],
                [COLUMNS[1], ROWS[0]],
                [COLUMNS[0], ROWS[1]],
                [ROWS[1], COLUMNS[1]],
            ],
            (0, 1, 2, 3),
        ),
    ],
)
def test_the_ranks_that_wait_forever_are_named(ledgers, waiting):
    found = stall(ledgers) or ""
    assert tuple(rank for rank in range(4) if f"{rank}: (" in found) == waiting
