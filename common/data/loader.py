"""Passes over a data set: which batch comes next, and how to resume from there after a restart."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Protocol

import torch
from torch import Tensor

from common.data.micro_batches import Draw, EvalSampler, TrainSampler
from common.errors import AgreedError, UserError

Batch = tuple[Tensor, Tensor]


class BatchReader(Protocol):
    """Turns draws into batches, in order; may read as far ahead as it likes. ``size`` is the side of the images."""

    size: int
    device: torch.device

    def read(self, draws: Iterator[Draw]) -> Generator[Batch, None, None]: ...

    def close(self) -> None: ...


class Loader:
    """Yield ``(images, labels)``; each ``iter()`` is a fresh pass over the next epoch.

    After `load_state_dict` the first pass is the rest of that epoch. The state is the position after the last batch
    yielded, in samples over all ranks, so it holds for any number of processes. A pass that was left early is closed by
    the next one, or by `close`.
    """

    def __init__(self, sampler: TrainSampler | EvalSampler, reader: BatchReader) -> None:
        self.sampler, self.reader = sampler, reader
        self._pass: Generator[Batch, None, None] | None = None
        self._next_pass = self._position = (0, 0)
        self._defers_errors, self._error = False, ""

    def __len__(self) -> int:
        """Return the batches of a whole pass."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        self._end_pass()
        epoch, start = self._position = self._next_pass
        self._next_pass = (epoch + 1, 0)
        self._pass = self._batches(epoch, start)
        return self._pass

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of its samples yielded so far, over all ranks."""
        epoch, done = self._position
        return {"epoch": epoch, "samples": done * self.sampler.stride}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from a position; between optimizer steps it may be from a run with another number of processes."""
        self._end_pass()
        done, rest = divmod(state["samples"], self.sampler.stride)
        if rest:
            raise AgreedError(
                f"the checkpoint's position, {state['samples']} samples into an epoch, lies within a batch of "
                f"{self.sampler.stride}: resume from another one"
            )
        # beyond the end: the data set has shrunk since
        self._next_pass = self._position = (state["epoch"], done) if done < len(self) else (state["epoch"] + 1, 0)

    @property
    def failure(self) -> str:
        """Why the run should end, and the remedy; "" as long as the reader works."""
        return self._error or getattr(self.reader, "failure", "")

    @property
    def is_blank(self) -> bool:
        """Whether the last batches were NaN because of a deferred error."""
        return self._error != ""

    def defer_errors(self) -> None:
        """Instead of raising a `UserError` of the reader, report it as ``failure`` and continue with NaN images.

        The other ranks are in the same step, and cannot end it without this one; NaN makes all of them skip its update.
        """
        self._defers_errors = True

    def close(self) -> None:
        """End the pass and the reader's threads and processes."""
        self._end_pass()
        self.reader.close()

    def _end_pass(self) -> None:
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def _batches(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        done = start
        try:
            if not self._error:
                with closing(self.reader.read(self.sampler.draws(epoch, start))) as batches:
                    for done, batch in enumerate(batches, start + 1):
                        self._position = (epoch, done) if done < len(self) else (epoch + 1, 0)
                        yield batch
        except UserError as error:
            if not self._defers_errors:
                raise
            self._error = str(error)
        for _ in range(done, len(self)):  # after an error
            batch, size, device = self.sampler.stride // self.sampler.dp_size, self.reader.size, self.reader.device
            nan = torch.full((batch, 3, size, size), torch.nan, device=device)
            yield nan, torch.zeros(batch, dtype=torch.int64, device=device)
