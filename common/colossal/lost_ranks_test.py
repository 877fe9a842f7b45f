"""What the ranks that are left say when one is gone."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from common.colossal import ParallelMode, gpc, launch
from common.colossal.lost_ranks import GRACE, naming_lost_ranks
from common.errors import UserError
from common.testing import run_ranks

TIMEOUT = 0.5


def meet(lost: int, hangs: bool) -> tuple[str, float]:
    """Return what this rank of four learns about the one that does not come back, and the seconds that took."""
    rank = int(os.environ["RANK"])
    if rank == lost and not hangs and (child := os.fork()):
        os.waitpid(child, 0)
        return "", 0.0
    launch({}, rank, 4, "127.0.0.1", int(os.environ["MASTER_PORT"]), "gloo", verbose=False, timeout=TIMEOUT)
    dist.all_reduce(torch.ones(1))
    started = time.monotonic()
    if rank == lost:
        if not hangs:
            os._exit(1)
        time.sleep(3 * TIMEOUT + GRACE)
        return "", 0.0
    with pytest.raises(UserError) as caught, naming_lost_ranks():
        dist.all_reduce(torch.ones(1))
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize(("lost", "hangs"), [(0, False), (2, False), (1, True)])
def test_a_rank_that_dies_or_hangs_is_named(lost: int, hangs: bool) -> None:
    answers = run_ranks(4, meet, lost, hangs)
    for message, seconds in answers[:lost] + answers[lost + 1 :]:
        assert message.startswith(f"rank {lost} is gone or hanging, of 4 processes")
        assert seconds < 2 * TIMEOUT + GRACE + 1


def group_that_outlives_its_patience() -> str:
    rank = int(os.environ["RANK"])
    parallel = {"tensor": {"mode": "1d", "size": 2}}
    address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    launch({"parallel": parallel}, rank, 2, *address, "gloo", verbose=False, timeout=TIMEOUT)
    if rank == 1:
        time.sleep(2 * TIMEOUT)
        return ""
    with pytest.raises(RuntimeError, match="Timed out") as caught:
        dist.all_reduce(torch.ones(1), group=gpc.get_group(ParallelMode.TENSOR))
    return str(caught.value)


def test_the_timeout_holds_in_every_group() -> None:
    assert "500ms" in run_ranks(2, group_that_outlives_its_patience)[0]


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), naming_lost_ranks():
        raise RuntimeError("out of memory")
