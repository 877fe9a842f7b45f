"""What the other ranks say when one dies or hangs: processes that are killed and stopped."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from common.colossal import doing, gpc, launch, shutdown
from common.colossal.lost_ranks import naming_lost_ranks
from common.errors import UserError
from common.testing.commands import forked
from common.testing.ranks import free_port, run_ranks

TIMEOUT = 6.0
SIZE = 3


def wait_for_the_others() -> None:
    dist.all_reduce(torch.ones(1))


def compute() -> None:
    time.sleep(1000)


def wait_for_the_gpu() -> None:
    doing("step 5: wait_for_the_gpu")  # where no error tells it of the lost rank
    time.sleep(1000)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise RuntimeError("out of memory")


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(1000)


def train(rank: int, port: int, lost: int, fault: Callable[[], None], others: Callable[[], None], _: object) -> None:
    launch({}, rank, SIZE, "127.0.0.1", port, "gloo", verbose=False, timeout=TIMEOUT)
    with naming_lost_ranks():
        for step in range(1, 4):
            doing(f"step {step}: forward")
            dist.all_reduce(torch.ones(1))
        doing("step 4: " + (fault if rank == lost else others).__name__)
        time.sleep(0.5)
        if rank == lost:
            Path("began").write_text(str(time.time()))
            fault()
        others()
    shutdown()


@contextmanager
def running(*args: object) -> Iterator[list[tuple[BaseProcess, Path, Path]]]:
    """Run `train` on all ranks; yield their processes and the files of their output."""
    port = free_port()
    with ExitStack() as stack:
        yield [stack.enter_context(forked(partial(train, rank, port, *args), RANK=str(rank))) for rank in range(SIZE)]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


HOW = {
    kill: "is gone; last seen: step 4: kill",
    stop: "is gone; last seen: step 4: stop",
    fail: "is gone; last seen: RuntimeError: out of memory",
    compute: "hangs; last seen: step 4: compute",
    hold_the_interpreter: "is gone; last seen: step 4: hold_the_interpreter",
}


FAULTS = ((kill, 0), (kill, 2), (stop, 2), (fail, 0), (compute, 0), (compute, 1), (hold_the_interpreter, 1))


@pytest.mark.parametrize(
    ("fault", "lost", "others"),
    [
        *((fault, lost, wait_for_the_others) for fault, lost in FAULTS),
        (kill, 0, compute),
        (stop, 1, compute),
        (compute, 1, wait_for_the_gpu),
    ],
)
def test_the_others_name_the_rank_and_end_in_time_and_one_that_hangs_prints_stacks(
    fault: Callable[[], None], lost: int, others: Callable[[], None]
) -> None:
    with running(lost, fault, others) as ranks:
        _, _, err_of_lost = ranks.pop(lost)
        for process, _, err in ranks:
            process.join(60)
            assert process.exitcode == 2, err.read_text()
        began = float(Path("began").read_text())
        for _, _, err in ranks:
            assert os.path.getmtime(err) < began + TIMEOUT + 3  # on a busy machine
            (line,) = [line for line in err.read_text().splitlines() if line.startswith("error:")]
            assert line.startswith(f"error: of 3 processes, rank {lost} {HOW[fault]};")
            if others is wait_for_the_others:
                assert "Thread 0x" not in err.read_text()  # no stacks of ranks that only wait
        while fault in (compute, hold_the_interpreter) and f"in {fault.__name__}" not in err_of_lost.read_text():
            assert time.time() < began + 2 * TIMEOUT + 3
            time.sleep(0.1)


def end(seconds: float) -> float:
    """Return how long this rank took to leave, after ``seconds`` in which the other may have left already."""
    place = int(os.environ["RANK"]), 2, "127.0.0.1", int(os.environ["MASTER_PORT"])
    launch({}, *place, "gloo", verbose=False, timeout=600)
    wait_for_the_others()
    time.sleep(seconds if place[0] == 1 else 0)
    started = time.monotonic()
    shutdown()
    return time.monotonic() - started


def test_nobody_is_missed_who_ends_well() -> None:
    assert max(run_ranks(2, end, 0.0)) < 5  # a rank that is missed is waited for 10 s
    assert run_ranks(2, end, 1.5)[1] < 5


@pytest.mark.parametrize(
    ("error", "verdict", "code"),
    [
        (RuntimeError("CUDA error: out of memory"), "", 1),
        (UserError("MAX_SKIPPED=20"), "", 2),
        (RuntimeError("NCCL communicator was aborted"), "rank 1 is gone", 2),
        (RuntimeError("NCCL communicator was aborted"), "", 1),
    ],
)
def test_with_nccl_every_error_ends_the_process_without_its_clean_up(error, verdict, code, monkeypatch) -> None:
    exits = []
    beats = SimpleNamespace(fail=lambda words: None, await_verdict=lambda: verdict)
    monkeypatch.setattr(gpc, "heartbeat", beats)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr("atexit.register", lambda *call: exits.append(call))
    with pytest.raises(type(error) if not verdict else UserError), naming_lost_ranks():
        raise error
    assert exits == [(os._exit, code)]
