"""The benchmark runs, and its timer counts the timed steps only."""

import time
from pathlib import Path

import bench
import pytest


def test_every_part(capsys: pytest.CaptureFixture) -> None:
    bench.main(["--tiny"])
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines()]
    names = [cells[1].strip() for cells in lines if cells[-2:-1] == ["  1 "]]
    assert names == [name for variants in bench.PARTS.values() for name in variants]


def test_time_is_that_of_the_timed_steps() -> None:
    times: bench.Times = {}
    for seconds in bench.Work((), 2, 1, Path(), compiled=False).time([0.4, 0.1, 0.1, 0.4], times):
        time.sleep(seconds)
    assert times["wall"] == pytest.approx(0.1, abs=0.09)
