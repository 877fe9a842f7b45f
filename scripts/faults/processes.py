"""Runs of several processes, forked from this one so that they need not import torch again, and what starts them."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.testing.ranks import become_rank, free_port

INTERVAL = 0.01  # seconds between two looks at the processes
PATIENT = 30.0  # seconds between the SIGTERM and the SIGKILL of a launcher, as of torchrun and srun
IMPATIENT = 0.5  # where it does not matter how the others end
LEAVING = 5.0  # seconds that a worker process may take to notice that its parent has ended
LIMIT = 120.0  # seconds that a run may take
Inject = Callable[[int], None]  # called in each process with its rank, before the run


class RunLostError(Exception):
    """What a run should have done, and did not."""


def expect(condition: object, message: object) -> None:
    """Raise `RunLostError` unless ``condition`` holds."""
    if not condition:
        raise RunLostError(message)


@dataclass(frozen=True)
class Ended:
    """A run that is over: of each rank its exit status, or minus the signal that killed it, and all that it printed."""

    codes: list[int]
    outputs: list[str]
    seconds: float
    ends: list[float]  # when each ended, by time.monotonic()
    left: list[int]  # their worker processes that did not end

    @property
    def printed(self) -> str:
        return "\n".join(self.outputs)

    def expect(self, codes: Sequence[int] | int, *words: str) -> "Ended":
        """Raise `RunLostError` unless all ranks ended with ``codes``, printed ``words`` and left no process."""
        expected = [codes] * len(self.codes) if isinstance(codes, int) else list(codes)
        expect(self.codes == expected, f"exit statuses {self.codes} instead of {expected}: {self.printed[-2000:]}")
        expect(not self.left, f"processes left behind: {self.left}")
        return self.expect_words(*words)

    def expect_words(self, *words: str) -> "Ended":
        for word in words:
            expect(word in self.printed, f"{word!r} is not printed: {self.printed[-3000:]}")
        return self

    def expect_killed(self, rank: int) -> "Ended":
        expect(self.codes[rank] == -signal.SIGKILL, f"rank {rank} was not killed: {self.codes}: {self.printed}")
        return self


class Ranks:
    """``size`` processes that call ``command``, each the leader of a session, as torchrun starts them.

    Their output goes into files in ``folder``. A size of 0 is a single process without a launcher.
    """

    def __init__(self, size: int, command: Callable[[], object], folder: Path, inject: Inject | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.started, port, context = time.monotonic(), free_port(), multiprocessing.get_context("fork")
        self.files = [folder / f"rank{rank}.txt" for rank in range(max(1, size))]
        self.ends, self.processes = [0.0] * len(self.files), []
        for rank, file in enumerate(self.files):
            file.touch()
            self.processes.append(context.Process(target=_run_rank, args=(rank, size, port, file, command, inject)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork() with threads around
                self.processes[-1].start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def send(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to ranks, by default to all."""
        for rank in range(len(self.processes)) if ranks is None else ranks:
            if self.processes[rank].exitcode is None:
                os.kill(self.processes[rank].pid, number)

    def wait(self, lost: int | None = None, grace: float = IMPATIENT) -> Ended:
        """Wait for the end of all. As a launcher, end the others where one fails, by force after ``grace`` seconds.

        With a rank that is ``lost``, there is no launcher, and that rank is killed after the end of all others.
        """
        deadline, killing_at = self.started + LIMIT, float("inf")
        while None in (codes := self._codes()):
            now = time.monotonic()
            if lost is not None:
                if None not in codes[:lost] + codes[lost + 1 :]:
                    self.send(signal.SIGKILL, [lost])
            elif killing_at == float("inf") and any(codes):
                self.send(signal.SIGTERM)
                killing_at = now + grace
            if now > min(deadline, killing_at):
                self.send(signal.SIGKILL)
            time.sleep(INTERVAL)
        seconds = time.monotonic() - self.started
        left = remove_processes(self.pids)
        outputs = [file.read_text(errors="replace") for file in self.files]
        expect(seconds <= LIMIT, f"the run did not end within {LIMIT:g} s: {outputs}")
        return Ended(codes, outputs, seconds, self.ends, left)

    def _codes(self) -> list[int | None]:
        codes = [process.exitcode for process in self.processes]
        now = time.monotonic()
        self.ends = [end or now * (code is not None) for end, code in zip(self.ends, codes, strict=True)]
        return codes


def _run_rank(
    rank: int, size: int, port: int, file: Path, command: Callable[[], object], inject: Inject | None
) -> None:
    os.setsid()
    output = os.open(file, os.O_WRONLY)
    for stream, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(output, number)
        setattr(sys, stream, os.fdopen(number, "w", buffering=1, closefd=False))  # pytest has put others there
    sys.__stderr__ = sys.stderr
    become_rank(rank, size, port)
    faulthandler.enable()
    if inject is not None:
        inject(rank)
    command()


def remove_processes(sessions: Sequence[int]) -> list[int]:
    """Return the processes of the sessions that have not ended after `LEAVING` seconds, and kill them."""
    deadline = time.monotonic() + LEAVING
    while (left := processes_of(sessions)) and time.monotonic() < deadline:
        time.sleep(INTERVAL)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def processes_of(sessions: Sequence[int]) -> list[int]:
    """Return the processes of the sessions that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session, *_ = path.read_text().rpartition(")")[2].split()
            if state != "Z" and int(session) in sessions:
                found.append(int(path.parent.name))
    return found
