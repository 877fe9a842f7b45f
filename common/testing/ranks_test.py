"""`run_ranks` itself."""

import gc
import os
import time
from pathlib import Path

import pytest

from common.testing.ranks import run_ranks


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ArithmeticError("the reason")
    time.sleep(60)


def test_a_failure_is_raised_with_its_traceback_and_ends_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1: Traceback(.|\n)*fail_on_rank_1(.|\n)*the reason"):
        run_ranks(2, fail_on_rank_1)
    assert time.monotonic() - started < 30


def test_a_rank_that_dies_or_hangs() -> None:
    with pytest.raises(RuntimeError, match="rank 0: died without an answer"):
        run_ranks(1, os._exit, 3)
    with pytest.raises(TimeoutError, match=r"no answer in time from ranks \[0, 1\]"):
        run_ranks(2, time.sleep, 60, timeout=0.5)


class Left:
    """Garbage once dropped: it refers to itself."""

    def __init__(self, log: Path) -> None:
        self.log, self.itself = log, self

    def __del__(self) -> None:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")


def test_a_rank_does_not_collect_what_tests_left(tmp_path: Path) -> None:
    gc.disable()
    try:
        Left(tmp_path / "log")
        run_ranks(1, gc.collect)
        gc.collect()
    finally:
        gc.enable()
    assert (tmp_path / "log").read_text() == f"{os.getpid()}\n"
