"""Signals sent to a process, which ends at once, or notes them while deferring."""

import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args

from common.launch.signals import run_torchrun
from common.testing.commands import has_ended, run_python, wait_until

IMPORTS = """
import ctypes, multiprocessing, os, signal, sys, threading, time
from common.launch.signals import stop_signals
from common.process import script_scope

script = script_scope()
script.__enter__()

def send(name):
    os.kill(os.getpid(), getattr(signal, name))

def wait(seconds):
    # like a wait in C++, this keeps Python's own handlers from running
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=seconds)
"""
START = """
stop_signals.install()
send(NAME)
wait(60)
"""
TRAIN = """
stop_signals.install()
stop_signals.deferring = True
send(NAME)
while not stop_signals.received:
    wait(0.05)
assert stop_signals.received == getattr(signal, NAME)
send(NAME)  # a launcher passes on the terminal's signal so
wait(1.2)
send("SIGTERM")
wait(0.3)
print("goes on", file=sys.stderr, flush=True)
if NAME == "SIGINT":  # a second Ctrl-C ends it
    send(NAME)
    wait(60)
os._exit(0)
"""
WITHOUT_TERMINAL = """
stop_signals.install()
os.close(2)
send("SIGHUP")
wait(60)
"""


@pytest.mark.parametrize(
    ("program", "name", "code", "said"),
    [
        (START, "SIGTERM", 143, "SIGTERM: exiting\n"),
        (START, "SIGUSR1", 143, "SIGUSR1: exiting\n"),
        (START, "SIGINT", 130, "Ctrl-C: exiting\n"),
        (START, "SIGHUP", 143, "SIGHUP: exiting\n"),
        (TRAIN, "SIGTERM", 0, "SIGTERM: stopping after this step\ngoes on\n"),
        (TRAIN, "SIGUSR1", 0, "SIGUSR1: stopping after this step\ngoes on\n"),
        (TRAIN, "SIGINT", 130, "Ctrl-C: stopping after this step\ngoes on\nCtrl-C: exiting\n"),
        (WITHOUT_TERMINAL, "SIGHUP", 143, ""),
    ],
)
def test_a_signal_ends_the_process_or_is_noted_while_training(program, name, code, said):
    ended = run_python(f"{IMPORTS}NAME = {name!r}{program}")
    assert (ended.returncode, ended.stderr) == (code, said)


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


@pytest.mark.parametrize("name", PROGRAMS)
def test_ends_well(name):
    # only the first process says what it does
    ended = run_python(IMPORTS + PROGRAMS[name], env=os.environ | {"RANK": "1", "WORLD_SIZE": "2"})
    line = "SIGTERM: no progress for 0 s; exiting\n" if "progress" in name else ""
    assert (ended.returncode, ended.stderr) == (0, line)


FORK = """
# signals arrive before the child ignores them
os.register_at_fork(after_in_child=lambda: time.sleep(0.5))
stop_signals.install()
stop_signals.deferring = True
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(1)
print(child, flush=True)
while not stop_signals.received:
    wait(0.05)
print(stop_signals.received, flush=True)
time.sleep(60)
"""


def test_a_worker_leaves_signals_to_its_parent_and_dies_with_it():
    command = [sys.executable, "-c", IMPORTS + FORK]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            child = int(process.stdout.readline())
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                os.kill(child, number)
            os.killpg(process.pid, signal.SIGTERM)
            assert process.stdout.readline() == f"{signal.SIGTERM.value}\n"
            assert os.path.exists(f"/proc/{child}")
        finally:
            process.kill()
    wait_until(lambda: has_ended(child), seconds=10)


IN_FORK = """
import os, signal
from functools import partial

# it is pending until the signals are no longer blocked
os.register_at_fork(before=partial(os.kill, os.getpid(), signal.SIGINT))
{imports}
handler = signal.getsignal(signal.SIGINT)
script.__exit__(None, None, None)
if {installs}:
    stop_signals.install()
try:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(10)
except KeyboardInterrupt:
    stop_signals.restore()
    assert signal.getsignal(signal.SIGINT) is handler
    print("stopped")
"""


@pytest.mark.parametrize("installs", [False, True])
def test_a_signal_that_comes_during_a_fork_is_not_lost(installs):
    """Python ignores what a handler raises in a function that it calls before or after a fork."""
    ended = run_python(IN_FORK.format(imports=IMPORTS, installs=installs))
    assert (ended.stdout, ended.stderr) == ("stopped\n", "")


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
    # torchrun would set 1.
    assert os.environ["OMP_NUM_THREADS"] == str(torch.get_num_threads())


@pytest.mark.parametrize(("code", "status"), [(1, 1), (-9, 137)])
def test_torchrun_ends_with_the_status_of_its_training(monkeypatch, capsys, code, status):
    failed = ChildFailedError("train.py", {0: ProcessFailure(0, 1, code, "")})
    monkeypatch.setattr("torch.distributed.run.main", Mock(side_effect=failed))
    with pytest.raises(SystemExit, match=f"^{status}$"):
        run_torchrun([])
    assert "train.py FAILED" in capsys.readouterr().err
