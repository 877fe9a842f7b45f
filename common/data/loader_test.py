"""Passes, left early and resumed after a restart, in as many processes or others."""

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice

import torch

from common.data.loader import Loader
from common.data.sampler import Draw, TrainSampler


class ReadsAhead:
    """Yield each draw's indices as the batch, three draws behind."""

    def __init__(self) -> None:
        self.open_passes = 0

    def read(self, draws: Iterator[Draw]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.open_passes += 1
        ahead = deque(islice(draws, 3))
        try:
            for draw in chain(draws, [None] * len(ahead)):
                ahead.append(draw)
                yield torch.from_numpy(ahead.popleft().indices), torch.zeros(1)
        finally:
            self.open_passes -= 1


def build(micro_batch: int = 2, dp_rank: int = 0, dp_size: int = 1) -> Loader:
    return Loader(TrainSampler(35, 8, micro_batch, dp_rank=dp_rank, dp_size=dp_size, seed=3), ReadsAhead())


def batches(passes: Iterator) -> list[list[int]]:
    return [images.tolist() for images, _ in passes]


def drawn(loader: Loader, epoch: int) -> list[list[int]]:
    return [draw.indices.tolist() for draw in loader.sampler.draws(epoch)]


def test_each_pass_is_the_next_epoch_also_after_one_that_was_left_early():
    loader = build()
    first = iter(loader)
    next(first)
    assert [batches(loader) for _ in range(2)] == [drawn(loader, epoch) for epoch in (1, 2)]
    assert list(first) == []
    assert loader.reader.open_passes == 0


def test_resumes_after_the_last_batch_handed_out():
    for taken in range(len(build()) + 1):
        loader, resumed = build(), build()
        batches(loader)
        running = iter(loader)
        for _ in range(taken):
            next(running)
        resumed.load_state_dict(loader.state_dict())
        assert resumed.state_dict() == loader.state_dict()
        assert batches(resumed) == (batches(running) or batches(loader))
