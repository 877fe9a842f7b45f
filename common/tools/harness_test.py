import os
import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing import Pipe

import psutil
import pytest
import torch

from common.errors import UserError
from common.tools import harness
from common.tools.harness import (  # fmt: skip
    NotRunError,
    Rounds,
    Row,
    UnfinishedError,
    WrongError,
    cpu_seconds,
    in_processes,
    interleave,
    run_piece,
    timed,
)


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def good() -> Iterator[Row]:
    yield {"process": os.getpid()}
    yield {"share": 1 / 3}


def broken() -> Iterator[Row]:
    yield {"before": 1}
    raise ZeroDivisionError("the reason")


def crashing() -> Iterator[Row]:
    yield {"before": 1}
    subprocess.Popen(["sleep", "600"])  # holds what it was given open
    os.kill(os.getpid(), signal.SIGKILL)


def wrong() -> Iterator[Row]:
    yield {"figure": 2}
    raise WrongError("2 is not 3")


def without_data() -> Iterator[Row]:
    raise NotRunError("no data")
    yield {}


def unfinished() -> Iterator[Row]:
    yield {"step": 1}
    raise UnfinishedError("half of it")


def without_library() -> Iterator[Row]:
    import no_such_library  # noqa: F401

    yield {}


def without_own_module() -> Iterator[Row]:
    import common.no_such_module  # noqa: F401

    yield {}


@pytest.mark.parametrize(
    ("piece", "rows", "status", "why"),
    [
        (good, 2, "complete", "None"),
        (broken, 1, "failed", "ZeroDivisionError: the reason"),
        (crashing, 1, "failed", "its process ended with exit code -9"),
        (wrong, 1, "failed", "2 is not 3"),
        (without_data, 0, "not run", "no data"),
        (unfinished, 1, "unfinished", "half of it"),
        (without_library, 0, "not run", "no_such_library is not installed"),
        (without_own_module, 0, "failed", "No module named 'common.no_such_module'"),
    ],
)
def test_a_piece_has_a_process_of_its_own(piece, rows: int, status: str, why: str) -> None:
    saved: list[Row] = []
    ended = run_piece(piece, seconds=60, save=saved.append)
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
    for child in saved[0]["children"]:
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def burn(seconds: float) -> None:
    until = cpu_seconds() + seconds
    while cpu_seconds() < until:
        pass


def test_the_order_rotates() -> None:
    called = []
    variants = {name: lambda name=name: called.append(name) or {"name": name} for name in "abc"}
    figures = interleave(variants, 3)
    assert "".join(called) == "abcbcacab"
    assert figures == {name: [{"name": name}] * 3 for name in "abc"}


def test_cpu_time_counts_children() -> None:
    def in_a_child() -> None:
        if (child := os.fork()) == 0:
            burn(0.1)
            os._exit(0)
        os.waitpid(child, 0)

    figures = timed(in_a_child)
    assert figures["cpu"] >= 0.1
    assert figures["wall"] > 0


def answer_with_pid(rounds: Rounds) -> None:
    for number, figures in enumerate(rounds):
        figures |= {"pid": os.getpid(), "number": number}


def answer_from_anothers_loop(rounds: Rounds) -> None:
    number = 0
    while rounds.start():
        rounds.stop({"pid": os.getpid(), "number": number})
        number += 1


def test_processes_answer_round_by_round() -> None:
    with in_processes({"a": answer_with_pid, "b": answer_from_anothers_loop}) as variants:
        figures = interleave(variants, 3)
    assert [one["number"] for one in figures["a"]] == [one["number"] for one in figures["b"]] == [0, 1, 2]
    pids = {one["pid"] for rounds in figures.values() for one in rounds}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert all(one["wall"] >= 0 and one["cpu"] >= 0 for one in figures["a"])


def never_end(rounds: Rounds) -> None:
    answer_with_pid(rounds)
    time.sleep(600)


def test_a_process_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "LEAVING", 0.1)
    with in_processes({"a": never_end}) as variants:
        figures = interleave(variants, 1)
    assert not os.path.exists(f"/proc/{figures['a'][0]['pid']}")


def refuse(rounds: Rounds) -> None:
    raise UserError("--steps 0: at least 1")


def die(rounds: Rounds) -> None:
    os._exit(1)


def hang(rounds: Rounds) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("variant", "message"),
    [(refuse, "--steps 0: at least 1"), (die, "b failed: its own"), (hang, "b failed: no answer within 2 s")],
)
def test_a_variant_that_fails_is_told(variant, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "LIMIT", 2.0)
    monkeypatch.setattr(harness, "LEAVING", 0.1)
    with pytest.raises(UserError, match=message), in_processes({"a": answer_with_pid, "b": variant}):
        pytest.fail("b was never ready")


def test_a_variant_ends_with_its_parent() -> None:
    """Where the parent is killed, its end of the pipe closes, though the variants were forked one after another."""
    receiver, sender = Pipe(duplex=False)
    parent = os.fork()
    if parent == 0:
        with in_processes({"a": answer_with_pid, "b": answer_with_pid}) as variants:
            sender.send([figures[0]["pid"] for figures in interleave(variants, 1).values()])
            time.sleep(600)
    pids = receiver.recv()
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_mistake_that_another_variant_has_told_before_is_left_alone() -> None:
    parents, theirs = Pipe()
    parents.close()
    harness._run_variant(theirs, refuse)
