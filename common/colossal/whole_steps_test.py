"""Passes of whole optimizer steps, over loaders of every kind."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from common.colossal.whole_steps import WholeSteps


class OneShot:
    """An iterator that has to be reset before another pass, as DALI's."""

    def __init__(self, batches: int, *, endless: bool = False) -> None:
        self.batches, self.endless, self.position, self.handed_out = batches, endless, 0, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.position == self.batches and not self.endless:
            raise StopIteration
        assert self.handed_out < 100, "read far beyond the pass"
        self.position += 1
        self.handed_out += 1
        return self.position

    def reset(self) -> None:
        self.position = 0


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", [lambda batches: list(range(1, batches + 1)), OneShot, partial(OneShot, endless=True)])
def test_every_pass_is_whole(kind: Callable[[int], Any], accumulation: int) -> None:
    loader = kind(8)
    steps = WholeSteps(loader, accumulation)
    expected = list(range(1, 9 if accumulation == 1 else 7))
    assert len(steps) == len(expected)
    assert [list(steps), list(steps)] == [expected, expected]
    if isinstance(loader, OneShot):
        assert steps.handed_out == 2 * len(expected)  # no batch is read and dropped
