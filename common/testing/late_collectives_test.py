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
    for values, pending, asynchronous in run_ranks(2, reduce, True):
        assert values == [2.0, 2.0]
        assert pending == 0
        assert asynchronous == 1
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
    if dist.get_rank() == 1:
        groups = groups[::-1]
    works = [dist.all_reduce(x.clone(), group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()


@pytest.mark.parametrize(("start", "stalls"), [(same_order, False), (two_orders, True)])
def test_two_orders_would_stall(start, stalls):
    ledgers = run_ranks(2, orders, start)
    found = stall(ledgers)
    assert (found is not None) == stalls


def entry(group: str, ranks: str, numel: int = 2, dtype: str = "torch.float32") -> Entry:
    return "allreduce_", group, tuple(map(int, ranks)), dtype, numel, ()


SUM = entry("0", "01")
LONGER = entry("0", "01", numel=3)
IN_HALF = entry("0", "01", dtype="torch.float16")
# A square: no two ranks have two groups in common.
FIRST_ROW = entry("a", "01")
SECOND_ROW = entry("b", "23")
FIRST_COLUMN = entry("c", "02")
SECOND_COLUMN = entry("d", "13")


@pytest.mark.parametrize(
    ("ledgers", "waiting"),
    [
        ([[SUM, SUM], [SUM, SUM]], []),
        ([[SUM], []], [0]),
        ([[SUM], [LONGER]], [0, 1]),
        ([[SUM], [IN_HALF]], [0, 1]),
        (
            [
                [FIRST_ROW, FIRST_COLUMN],
                [FIRST_ROW, SECOND_COLUMN],
                [SECOND_ROW, FIRST_COLUMN],
                [SECOND_ROW, SECOND_COLUMN],
            ],
            [],
        ),
        (
            [
                [FIRST_ROW, FIRST_COLUMN],
                [SECOND_COLUMN, FIRST_ROW],
                [FIRST_COLUMN, SECOND_ROW],
                [SECOND_ROW, SECOND_COLUMN],
            ],
            [0, 1, 2, 3],
        ),
    ],
)
def test_the_ranks_that_wait_forever_are_named(ledgers, waiting):
    said = stall(ledgers) or ""
    named = [rank for rank in range(4) if f"{rank}: (" in said]
    assert named == waiting
