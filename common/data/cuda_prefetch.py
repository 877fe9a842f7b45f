"""Prepare batches on a CUDA stream of their own."""

from collections.abc import Generator, Iterator
from contextlib import closing

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


def prefetch(batches: Generator[Batch, None, None], device: torch.device) -> Generator[Batch, None, None]:
    """Yield the batches unchanged; on a GPU, run what ``batches`` queues there on a stream of its own.

    Since the host runs ahead of the GPU, copies and kernels of the next batch overlap with the last step's.
    """
    with closing(batches):
        yield from batches if device.type == "cpu" else _prefetch(batches, device)


def _prefetch(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # on which the inputs were made
    while True:
        with torch.cuda.stream(stream):
            batch = next(batches, None)
        if batch is None:
            return
        training = torch.cuda.current_stream(device)
        training.wait_stream(stream)
        for tensor in batch:
            tensor.record_stream(training)  # or its memory would be reused too early
        yield batch
