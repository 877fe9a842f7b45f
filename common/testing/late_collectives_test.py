"""What a slow test of parity_test.py must see: a forgotten wait, and two orders."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from common.testing.late_collectives import disagreement, late_collectives
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


@pytest.mark.parametrize(
    ("start", "message"), [(same_order, None), (two_orders, "ranks 0 and 1, collective 0: ")]
)
def test_the_order_of_two_ranks_is_compared(start, message):
    found = disagreement(run_ranks(2, orders, start))
    assert found is None if message is None else found.startswith(message)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([], "ranks 0 and 1: 1 and 0 collectives"),
        ([("allreduce_", "0", (0, 1), "torch.float32", 3, ())], "ranks 0 and 1, collective 0: "),
        ([("allreduce_", "0", (0, 1), "torch.float16", 2, ())], "ranks 0 and 1, collective 0: "),
        ([("allreduce_", "1", (1, 2), "torch.float32", 2, ())], "ranks 0 and 1: 1 and 0"),
    ],
)
def test_the_ranks_of_a_group_take_part_in_the_same_collectives(second, message):
    first = [("allreduce_", "0", (0, 1), "torch.float32", 2, ())]
    assert disagreement([first, second]).startswith(message)
