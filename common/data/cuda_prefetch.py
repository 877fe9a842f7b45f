"""Queue the making of batches beside the training, where that is a GPU."""

from collections.abc import Generator, Iterator
from contextlib import closing

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


def prefetch(batches: Generator[Batch, None, None], device: torch.device) -> Iterator[Batch]:
    """Yield the batches unchanged; on a GPU, what ``batches`` queues there runs on a stream of its own.

    Nothing is asked for early. But the host is ahead of the GPU, so that copies and kernels of the next batch run
    beside those of the last step instead of behind them.
    """
    with closing(batches):
        yield from batches if device.type == "cpu" else _prefetch(batches, device)


def _prefetch(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # which has made what the batches are made from
    while True:
        with torch.cuda.stream(stream):
            batch = next(batches, None)
        if batch is None:
            return
        training = torch.cuda.current_stream(device)
        training.wait_stream(stream)
        for tensor in batch:
            tensor.record_stream(training)  # else its memory would be taken for a later batch too early
        yield batch
