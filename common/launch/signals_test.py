"""Signals sent to a process, which ends at once, or notes them while deferring."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args

from common.launch.signals import run_torchrun
from common.testing.commands import has_ended, run_python, wait_until

PROGRAM = """
import os, sys, threading, time
# signals arrive before the child ignores them
os.register_at_fork(after_in_child=lambda: time.sleep(0.5))
from common.launch.signals import stop_signals
stop_signals.install()
stop_signals.deferring = sys.argv[1] == "deferring"
if sys.argv[2:] == ["fork"] and (child := os.fork()) == 0:
    time.sleep(60)
    os._exit(1)
print(child if sys.argv[2:] == ["fork"] else "ready", flush=True)
while not stop_signals.received:
    # like a wait in C++, this keeps Python's own handlers from running
    threading.Lock().acquire(timeout=0.05)
print(stop_signals.received, flush=True)
time.sleep(60)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Start `PROGRAM` in a process group of its own, and wait for its first line."""
    started = []

    def start_process(*arguments: str) -> subprocess.Popen:
        command, pipe = [sys.executable, "-c", PROGRAM, *arguments], subprocess.PIPE
        process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        started.append(process)
        process.first_line = process.stdout.readline().strip()
        return process

    yield start_process
    for process in started:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen) -> tuple[int, str]:
    _, error = process.communicate(timeout=30)
    return process.returncode, error


@pytest.mark.parametrize(
    ("number", "code"), [("SIGTERM", 143), ("SIGUSR1", 143), ("SIGINT", 130), ("SIGHUP", 143)]
)
def test_before_training_a_signal_ends_the_process(start, number, code):
    process = start("starting")
    process.send_signal(signal.Signals[number])
    name = "Ctrl-C" if number == "SIGINT" else number
    assert end(process) == (code, f"{name}: exiting\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_while_training_it_is_noted(start, number):
    process = start("deferring")
    process.send_signal(number)
    assert process.stdout.readline() == f"{number.value}\n"
    process.send_signal(number)  # as from a launcher that passes on the terminal's signal
    assert process.poll() is None
    time.sleep(1.2)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    if number == signal.SIGINT:  # a second Ctrl-C ends it
        process.send_signal(number)
        assert end(process) == (130, "Ctrl-C: stopping after this step\nCtrl-C: exiting\n")


def test_a_process_ends_although_its_terminal_has_gone(start):
    process = start("starting")
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 143


PROGRAMS = {
    # torchrun sends SIGTERM to the ranks that are still about to exit after the first
    "after an agreed stop the launcher's signal changes nothing": """
stop_signals.install()
stop_signals.deferring = True
stop_signals.agreed = signal.SIGINT
os.kill(os.getpid(), signal.SIGTERM)
stop_signals.restore()
os.kill(os.getpid(), signal.SIGTERM)
os._exit(0)
""",
    # the thread of one run must have ended before the next: it would read, or close, a pipe that is
    # not its own
    "it can be installed again and leaves nothing behind": """
opened = os.listdir("/proc/self/fd")
for _ in range(100):
    stop_signals.install()
    stop_signals.install()  # changes nothing
    stop_signals.restore()
    assert os.listdir("/proc/self/fd") == opened
    assert threading.active_count() == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
""",
    "under nohup SIGHUP stays ignored, and the end of torchrun is a SIGTERM": """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.environ["TORCHELASTIC_RUN_ID"] = "1"
stop_signals.install(follow_parent=True)
assert stop_signals._patience == 25  # seconds: torchrun kills after 30
os.kill(os.getpid(), signal.SIGHUP)
stop_signals.restore()
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
assert number.value == signal.SIGTERM
""",
    "a fork leaves signals as they were, or ends if there is no progress, with a line": """
for patience, status in ((None, -signal.SIGTERM), (2, 0), (0, 143)):
    if (child := os.fork()) == 0:
        if patience is not None:
            stop_signals.install(progress=lambda: int(time.monotonic()), patience=patience)
            stop_signals.deferring = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    stop_signals.install()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
""",
    "a worker process does not keep its parent from ending": """
stop_signals.install()
multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True).start()
stop_signals.restore()
""",
}
IMPORTS = "import ctypes, multiprocessing, os, signal, threading, time\n"
# only the first process says what it does
IMPORTS += (
    "from common.launch.signals import stop_signals; os.environ.update(RANK='1', WORLD_SIZE='2')\n"
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_ends_well(name):
    done = run_python(IMPORTS + PROGRAMS[name])
    line = "SIGTERM: no progress for 0 s; exiting\n" if "progress" in name else ""
    assert (done.returncode, done.stderr) == (0, line)


def test_a_worker_leaves_signals_to_its_parent_and_dies_with_it(start):
    process = start("deferring", "fork")
    child = int(process.first_line)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(child, number)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == f"{signal.SIGTERM.value}\n"
    assert os.path.exists(f"/proc/{child}")
    process.kill()
    process.wait()
    wait_until(lambda: has_ended(child), seconds=10)


def test_torchrun_leaves_sighup_ignored_under_nohup_and_threads_to_the_ranks(monkeypatch):
    calls: list[list[str]] = []
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("torch.distributed.run.main", calls.append)
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run_torchrun(["train.py"])
    finally:
        signal.signal(signal.SIGHUP, previous)
    ((option, script),) = calls
    assert parse_args([option, script]).signals_to_handle == "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"
    assert os.environ["OMP_NUM_THREADS"] == str(torch.get_num_threads())  # else torchrun sets 1


@pytest.mark.parametrize(("code", "status"), [(1, 1), (-9, 137)])
def test_torchrun_ends_with_the_status_of_its_training(monkeypatch, capsys, code, status):
    failed = ChildFailedError("train.py", {0: ProcessFailure(0, 1, code, "")})
    monkeypatch.setattr("torch.distributed.run.main", Mock(side_effect=failed))
    with pytest.raises(SystemExit, match=f"^{status}$"):
        run_torchrun([])
    assert "train.py FAILED" in capsys.readouterr().err
