"""Hostile inputs of every kind are accepted, or refused in one line: the same examples in each run."""

import pytest
from fuzz import KINDS, fuzz


@pytest.mark.parametrize("kind", KINDS)
def test_no_example_is_broken(kind: str) -> None:
    outcomes = fuzz(kind, 34, 0)
    assert outcomes.total() == 34
    assert outcomes["broken"] == 0
    assert outcomes["refused in one line"]
    assert outcomes["accepted"]
