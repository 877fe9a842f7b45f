import torch
import torch.distributed as dist
from torch import nn

from common.planner.counters import Traffic
from common.testing.ranks import launched, run_ranks


def count() -> dict[str, int]:
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
        return {name: nbytes for (name, ranks), nbytes in traffic.nbytes.items() if ranks == (0, 1, 2, 3)}


def test_counts_the_message_of_every_collective():
    for nbytes in run_ranks(4, count):
        assert nbytes == {
            "all_reduce": 310 * 4,  # DDP's bucket: 310 parameters of 4 bytes
            "all_gather": 100 * 4,
            "reduce_scatter": 100 * 2,
            "broadcast": 25 * 4,
            "reduce": 25 * 4,
        }
