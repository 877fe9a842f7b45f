"""Passes over a data loader in whole optimizer steps."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any


class WholeSteps:
    """Iterate over ``loader`` in whole groups of ``accumulation`` batches; delegate all other attributes to it.

    Upstream's trainer never exhausts an iterator, so a loader that is its own iterator, such as DALI's, fails in the
    second pass; here it is ``reset()`` first. Upstream's GradAccumDataloader
    (legacy/engine/gradient_accumulation/_gradient_accumulation.py:154) then reads to the loader's end, if there is one.
    """

    def __init__(self, loader: Any, accumulation: int = 1):
        self.loader, self.accumulation = loader, accumulation
        self._used = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader) // self.accumulation * self.accumulation

    def __iter__(self) -> Iterator[Any]:
        batches: Iterable[Any] = iter(self.loader)
        if batches is self.loader and self._used:
            self.loader.reset()
        self._used = True
        return islice(batches, len(self))
