"""Passes over a data set: which batch comes next, and how to resume from there after a restart.

A loader yields ``(images float32 [B, 3, Y, X], labels int64 [B])`` on the device, in whole
micro-batches. Evaluation pads its last batches with zeros of label -100, which
`torch.nn.functional.cross_entropy` ignores.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from common.data.sampler import Draw, EvalSampler, TrainSampler
from common.data.sharing import Sharing

Batch = tuple[Tensor, Tensor]
Batches = Generator[Batch, None, None]


class BatchReader(Protocol):
    """Turn draws into batches, in order; may read as far ahead as it likes.

    Where ranks share the decoding, each reads some rows and the loader gathers the two tensors. A
    reader may yield something else then, which its ``join(parts, sharing, total)`` gathers.
    """

    def read(self, draws: Iterator[Draw]) -> Batches: ...

    def close(self) -> None: ...


class Loader:
    """Yield ``(images, labels)``; each ``iter()`` is a fresh pass over the next epoch.

    After `load_state_dict` the first pass is the rest of that epoch. The state is the position
    after the last batch yielded, in samples over all ranks, so it holds for any number of
    processes. A pass that was left early is closed by the next one, or by `close`. ``augment``, a
    `BatchAugment`, changes the batches of a training loader.
    """

    ends_with_step = True  # for `WholeSteps`

    def __init__(
        self,
        sampler: TrainSampler | EvalSampler,
        reader: BatchReader,
        name_image: Callable[[int], str] = "image {}".format,
    ):
        self.sampler = sampler
        self.reader = reader
        self.name_image = name_image  # where the image of an index lies
        self.augment: Callable[..., tuple[Tensor, Any]] | None = None
        # (epoch, samples of it yielded so far, over all ranks): now, and where the next pass starts
        self._position = (0, 0)
        self._next_pass = (0, 0)
        self._pass = self._batches(0, 0)  # a generator that is not started

    def __len__(self) -> int:
        """Return the number of batches per pass on this rank, at full size of images and batch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self._pass.close()
        # A pass that was left early (`close` above) is not continued: the next epoch begins.
        epoch, start = self._position = self._next_pass
        self._next_pass = (epoch + 1, 0)
        self._pass = self._batches(epoch, start)
        return self._pass

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of its samples yielded so far, over all ranks."""
        epoch, done = self._position
        return {"epoch": epoch, "samples": done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from a position.

        Between optimizer steps it may be from a run with another number of processes.
        """
        # The position is beyond the end if the data set has shrunk since.
        self._position = self._after(state["epoch"], state["samples"])
        self._next_pass = self._position

    def close(self) -> None:
        """End the pass and the reader's threads and processes."""
        self._pass.close()
        self.reader.close()

    def _batches(self, epoch: int, start: int) -> Generator[Any, None, None]:
        """Yield an epoch's batches from sample ``start`` on, and keep the position."""
        with closing(self.reader.read(self.sampler.draws(epoch, start))) as batches:
            done = start
            sharing = self.sampler.sharing
            join = getattr(self.reader, "join", _join)
            for batch in batches:
                if sharing.size > 1:
                    batch = join(batch, sharing, self.sampler.rows(epoch))
                # ``start`` and ``done`` count the samples of all ranks.
                local_sample = done // self.sampler.dp_size
                done += len(batch[1]) * self.sampler.dp_size
                # Set before the yield: a checkpoint during this step counts the batch as used.
                self._position = self._after(epoch, done)
                augment = self.augment
                yield augment(*batch, self.sampler, epoch, local_sample) if augment else batch

    def _after(self, epoch: int, done: int) -> tuple[int, int]:
        """Return the position after ``done`` samples of an epoch."""
        # The end of an epoch is the start of the next.
        return (epoch, done) if done < self.sampler.samples_of(epoch) else (epoch + 1, 0)


def _join(parts: Batch, sharing: Sharing, total: int) -> Batch:
    """Return a batch of ``total`` rows, given this rank's."""
    images, labels = (sharing.gather(part, total) for part in parts)
    return images, labels


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return an array on ``device``, to which it is copied without waiting for a GPU."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@cache
def _loading_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for all passes: the allocator keeps the memory of each stream apart."""
    return torch.cuda.Stream(device)


def prefetch(batches: Batches, device: torch.device) -> Batches:
    """Yield the batches unchanged. For a GPU, a thread makes the next one on a stream of its own.

    So neither the host's work for a batch nor its copies and kernels delay the step before it.
    """
    if device.type == "cpu":
        yield from batches
        return
    stream = _loading_stream(device)
    # The inputs (a reader's constants, images that a GPU holds) were made on the current stream.
    stream.wait_stream(torch.cuda.current_stream(device))

    def load() -> tuple[Batch, Any] | None:
        # A thread starts on GPU 0. Without the first context, restoring GPU 0's stream at the end
        # would initialise CUDA there: 0.5 GB for each rank.
        with torch.cuda.device(device), torch.cuda.stream(stream):
            batch = next(batches, None)
            return batch and (batch, stream.record_event())

    with closing(batches), ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
        loading = thread.submit(load)
        while True:
            loaded = loading.result()
            if not loaded:
                return
            loading = thread.submit(load)
            batch, ready = loaded
            training = torch.cuda.current_stream(device)
            training.wait_event(ready)
            for part in batch:
                # The allocator would otherwise reuse its memory while the step still reads it.
                if isinstance(part, Tensor):
                    part.record_stream(training)
            yield batch
