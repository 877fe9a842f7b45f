"""Passes over a data loader that end with a whole optimizer step."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any


class WholeSteps:
    """Iterate over ``loader`` afresh in every pass, leaving out a last, incomplete group of ``accumulation`` batches.

    Upstream's trainer takes ``len(loader)`` batches and never sees the end of an iterator, so one that is its own
    iterator, as DALI's are, fails in the second pass; and its GradAccumDataloader
    (legacy/engine/gradient_accumulation/_gradient_accumulation.py:154) reads the left-out batches to the end, forever
    if there is none. Here such an iterator is ``reset()`` before it is used again, and nothing is read for nothing.
    """

    def __init__(self, loader: Any, accumulation: int = 1):
        self.loader = loader
        self.accumulation = accumulation
        self._used = False

    def __len__(self) -> int:
        return len(self.loader) // self.accumulation * self.accumulation

    def __iter__(self) -> Iterator[Any]:
        batches: Iterable[Any] = iter(self.loader)
        if batches is self.loader and self._used:
            self.loader.reset()
        self._used = True
        return islice(batches, len(self))

    def state_dict(self) -> dict[str, int]:
        """Return the loader's position."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next pass be what is left of an epoch."""
        self.loader.load_state_dict(state)

    @property
    def failure(self) -> str:
        """What the loader can no longer do, and the remedy; "" while all is well."""
        return getattr(self.loader, "failure", "")

    def close(self) -> None:
        """End the loader's threads and processes, if it can."""
        if hasattr(self.loader, "close"):
            self.loader.close()
