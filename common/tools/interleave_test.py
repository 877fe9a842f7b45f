import multiprocessing
import os
import time

import pytest

from common.errors import UserError
from common.tools import interleave
from common.tools.interleave import Turns, cpu_seconds, in_processes, take_turns, timed

# Python 3.12 warns of every fork beside threads
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fork(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = multiprocessing.get_context("fork")  # importing anew takes seconds
    monkeypatch.setattr(interleave.multiprocessing, "get_context", lambda _: fork)


def burn(seconds: float) -> None:
    until = cpu_seconds() + seconds
    while cpu_seconds() < until:
        pass


def test_the_order_moves_on() -> None:
    called = []
    variants = {name: lambda name=name: called.append(name) or {"name": name} for name in "abc"}
    figures = take_turns(variants, 3)
    assert "".join(called) == "abcbcacab"
    assert figures == {name: [{"name": name}] * 3 for name in "abc"}


def test_cpu_time_counts_children() -> None:
    def in_a_child() -> None:
        child = multiprocessing.get_context("fork").Process(target=burn, args=(0.1,))
        child.start()
        child.join()

    figures = timed(in_a_child)
    assert figures["cpu"] >= 0.1
    assert figures["wall"] > 0


def answer_with_pid(turns: Turns) -> None:
    for number, turn in enumerate(turns):
        turn |= {"pid": os.getpid(), "number": number}


def answer_from_anothers_loop(turns: Turns) -> None:
    number = 0
    while turns.start():
        turns.stop({"pid": os.getpid(), "number": number})
        number += 1


def test_processes_answer_in_turn() -> None:
    with in_processes({"a": answer_with_pid, "b": answer_from_anothers_loop}) as variants:
        figures = take_turns(variants, 3)
    assert [turn["number"] for turn in figures["a"]] == [turn["number"] for turn in figures["b"]] == [0, 1, 2]
    pids = {turn["pid"] for turns in figures.values() for turn in turns}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert all(turn["wall"] >= 0 and turn["cpu"] >= 0 for turn in figures["a"])


def never_end(turns: Turns) -> None:
    answer_with_pid(turns)
    time.sleep(600)


def test_a_process_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleave, "LEAVING", 0.1)
    with in_processes({"a": never_end}) as variants:
        figures = take_turns(variants, 1)
    assert not os.path.exists(f"/proc/{figures['a'][0]['pid']}")


def refuse(turns: Turns) -> None:
    raise UserError("--steps 0: at least 1")


def die(turns: Turns) -> None:
    os._exit(1)


@pytest.mark.parametrize(("variant", "message"), [(refuse, "--steps 0: at least 1"), (die, "b failed")])
def test_a_variant_that_ends_is_told(variant, message: str) -> None:
    with pytest.raises(UserError, match=message), in_processes({"a": answer_with_pid, "b": variant}):
        pytest.fail("b was never ready")


def test_a_mistake_that_another_variant_has_told_before_is_left_alone() -> None:
    parents, theirs = multiprocessing.Pipe()
    parents.close()
    interleave._serve(theirs, refuse)
