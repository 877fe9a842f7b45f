import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

from common.errors import UserError
from common.testing.commands import has_ended, wait_until
from common.tools import harness
from common.tools.harness import (
    NotRunError,
    Rounds,
    Row,
    UnfinishedError,
    in_processes,
    interleave,
    run_piece,
    timed,
)


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run_steps(steps: Sequence[Any]) -> Iterator[Row]:
    """A piece: yield rows, raise exceptions and call functions."""
    for step in steps:
        if isinstance(step, Exception):
            raise step
        yield step if isinstance(step, dict) else step()


def crash() -> None:
    subprocess.Popen(["sleep", "600"])  # inherits the open files
    os.kill(os.getpid(), signal.SIGKILL)


ROW = {"step": 1}


@pytest.mark.parametrize(
    ("steps", "rows", "status", "why"),
    [
        ([ROW, lambda: {"process": os.getpid()}], 2, "complete", "None"),
        ([ROW, ZeroDivisionError("the reason")], 1, "failed", "ZeroDivisionError: the reason"),
        ([ROW, crash], 1, "failed", "its process ended with exit code -9"),
        ([ROW | {"wrong": "2 is not 3"}, ROW], 2, "failed", "2 is not 3"),
        ([NotRunError("no data")], 0, "not run", "no data"),
        ([ROW, UnfinishedError("half of it")], 1, "unfinished", "half of it"),
        ([partial(import_module, "no_such_library")], 0, "not run", "needs no_such_library"),
        ([partial(import_module, "common.no_such")], 0, "failed", "No module named 'common.no_such'"),
    ],
)
def test_a_piece_has_its_own_process(steps: Sequence[Any], rows: int, status: str, why: str) -> None:
    saved: list[Row] = []
    ended = run_piece(run_steps, steps, seconds=60, save=saved.append)
    assert (len(saved), ended[0]) == (rows, status)
    assert why in str(ended[1])
    assert all(row.get("process") != os.getpid() for row in saved)


def test_a_piece_over_its_limit_is_killed_with_what_it_started() -> None:
    def endless() -> Iterator[Row]:
        own, other = subprocess.Popen(["sleep", "600"]), subprocess.Popen(["setsid", "sleep", "600"])
        yield {"children": [own.pid, other.pid]}
        time.sleep(600)

    saved: list[Row] = []
    assert run_piece(endless, seconds=1, save=saved.append) == ("failed", "killed after its limit of 1 s")
    assert all(map(has_ended, saved[0]["children"]))


def test_the_order_rotates() -> None:
    called = []
    variants = {name: lambda name=name: called.append(name) or {"name": name} for name in "abc"}
    measured = interleave(variants, 3)
    assert "".join(called) == "abcbcacab"
    assert measured == {name: [{"name": name}] * 3 for name in "abc"}


def test_cpu_time_counts_children() -> None:
    measured = timed(lambda: subprocess.run([sys.executable, "-Sc", "import time\nwhile time.process_time() < 0.2: 0"]))
    assert measured["cpu"] >= 0.2
    assert measured["wall"] > 0


def answer_with_pid(rounds: Rounds) -> None:
    for number, measured in enumerate(rounds):
        measured |= {"pid": os.getpid(), "number": number}


def test_processes_answer_round_by_round() -> None:
    with in_processes({"a": answer_with_pid, "b": answer_with_pid}) as variants:
        measured = interleave(variants, 3)
    assert [one["number"] for one in measured["a"]] == [one["number"] for one in measured["b"]] == [0, 1, 2]
    pids = {one["pid"] for rounds in measured.values() for one in rounds}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert all(one["wall"] >= 0 and one["cpu"] >= 0 for one in measured["a"])


def refuse(rounds: Rounds) -> None:
    raise UserError("--steps 0: at least 1")


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (refuse, "--steps 0: at least 1"),
        (lambda rounds: os._exit(1), "b failed: its own"),
        (lambda rounds: time.sleep(600), "b failed: no answer within 2 s"),
    ],
)
def test_a_variant_that_fails_is_reported(variant, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "LIMIT", 2.0)
    monkeypatch.setattr(harness, "LEAVING", 0.1)
    with pytest.raises(UserError, match=message), in_processes({"a": answer_with_pid, "b": variant}):
        pytest.fail("b was never ready")


def test_a_variant_ends_with_its_parent() -> None:
    receiver, sender = Pipe(duplex=False)
    parent = os.fork()
    if parent == 0:
        with in_processes({"a": answer_with_pid, "b": answer_with_pid}) as variants:
            sender.send([measured[0]["pid"] for measured in interleave(variants, 1).values()])
            time.sleep(600)
    pids = receiver.recv()
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_until(lambda: all(map(has_ended, pids)), seconds=20)
