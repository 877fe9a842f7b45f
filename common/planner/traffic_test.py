import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.planner.traffic import Traffic
from common.testing.ranks import launched, run_ranks


def count() -> dict[str, float]:
    with launched():
        model = nn.parallel.DistributedDataParallel(nn.Linear(30, 10))
        pieces = [torch.empty(25) for _ in range(4)]
        with Traffic() as traffic:
            model(torch.ones(2, 30)).sum().backward()
            dist.all_gather(pieces, torch.ones(25))
            dist.reduce_scatter_tensor(torch.empty(25, dtype=torch.bfloat16), torch.ones(100, dtype=torch.bfloat16))
            dist.broadcast(pieces[0], 0)
            dist.reduce(pieces[0], 3)
            dist.barrier()
        return dict(traffic.sent)


def test_counts_every_collective_as_a_ring_sends_it():
    for sent in run_ranks(4, count):
        assert sent == pytest.approx(
            {
                "all_reduce": 2 * 3 / 4 * 310 * 4,  # DDP's bucket: 310 parameters of 4 bytes
                "all_gather": 3 / 4 * 100 * 4,
                "reduce_scatter": 3 / 4 * 100 * 2,
                "broadcast": 3 / 4 * 25 * 4,
                "reduce": 3 / 4 * 25 * 4,
            }
        )
