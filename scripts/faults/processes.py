"""Multi-process runs, forked from this process to avoid importing torch again, and their launcher."""

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import psutil

from common.testing.commands import forked
from common.testing.ranks import become_rank, free_port

INTERVAL = 0.01  # seconds between two polls of the processes
PATIENT = 30.0  # seconds between a launcher's SIGTERM and SIGKILL, as in torchrun and srun
IMPATIENT = 0.5  # where it does not matter how the other ranks end
LEAVING = 5.0  # seconds in which a worker process must notice that its parent has ended
LIMIT = 120.0  # seconds that a run may take
Inject = Callable[[int], object]  # called in each process with its rank, before the run


class RunLostError(Exception):
    """A run did not behave as expected."""


def expect(condition: object, message: object) -> None:
    """Raise `RunLostError` unless ``condition`` holds."""
    if not condition:
        raise RunLostError(message)


@dataclass(frozen=True)
class Ended:
    """A finished run: exit status (negative: the signal) and output of each rank."""

    codes: list[int]
    outputs: list[str]
    seconds: float
    ends: list[float]  # when each ended, by time.monotonic()
    left: list[int]  # worker processes that did not end

    @property
    def printed(self) -> str:
        return "\n".join(self.outputs)

    def expect(self, codes: Sequence[int] | int, *words: str) -> "Ended":
        """Raise `RunLostError` unless all ranks exited with ``codes``, printed ``words`` and left no process."""
        expected = [codes] * len(self.codes) if isinstance(codes, int) else list(codes)
        expect(self.codes == expected, f"exit statuses {self.codes} instead of {expected}: {self.printed[-2000:]}")
        expect(not self.left, f"processes left behind: {self.left}")
        return self.expect_words(*words)

    def expect_words(self, *words: str) -> "Ended":
        for word in words:
            expect(word in self.printed, f"{word!r} is not printed: {self.printed[-3000:]}")
        return self

    def expect_code(self, rank: int, code: int) -> "Ended":
        expect(self.codes[rank] == code, f"rank {rank} did not end with {code}: {self.codes}: {self.printed}")
        return self


class Ranks:
    """``size`` forked processes that call ``command``, each a session leader, as under torchrun.

    Size 0 is a single process without a launcher.
    """

    def __init__(self, size: int, command: Callable[[], object], inject: Inject | None = None) -> None:
        self.started, self.stack, port = time.monotonic(), ExitStack(), free_port()
        mains = [partial(_run_rank, rank, size, port, command, inject) for rank in range(max(1, size))]
        forks = [self.stack.enter_context(forked(main)) for main in mains]
        self.processes, self.files = [fork[0] for fork in forks], [fork[1:] for fork in forks]
        self.ends = [0.0] * len(forks)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def send(self, number: int, ranks: Sequence[int] | None = None) -> None:
        for rank in range(len(self.processes)) if ranks is None else ranks:
            if self.processes[rank].exitcode is None:
                os.kill(self.processes[rank].pid, number)

    def wait(self, lost: int | None = None, grace: float = IMPATIENT) -> Ended:
        """Wait for all ranks, as a launcher does: if one fails, the others get ``grace`` seconds.

        If a rank is ``lost``, there is no launcher; that rank is killed when all others have ended.
        """
        deadline, killing_at = self.started + LIMIT, float("inf")
        while None in (codes := self._codes()):
            if lost is not None:
                if None not in codes[:lost] + codes[lost + 1 :]:
                    self.send(signal.SIGKILL, [lost])
            elif killing_at == float("inf") and any(codes):
                self.send(signal.SIGTERM)
                killing_at = time.monotonic() + grace
            if time.monotonic() > min(deadline, killing_at):
                self.send(signal.SIGKILL)
            time.sleep(INTERVAL)
        seconds = time.monotonic() - self.started
        left = remove_processes(self.pids)
        outputs = ["".join(file.read_text(errors="replace") for file in files) for files in self.files]
        self.stack.close()
        expect(seconds <= LIMIT, f"the run did not end within {LIMIT:g} s: {outputs}")
        return Ended(codes, outputs, seconds, self.ends, left)

    def _codes(self) -> list[int | None]:
        codes, now = [process.exitcode for process in self.processes], time.monotonic()
        self.ends = [end or now * (code is not None) for end, code in zip(self.ends, codes, strict=True)]
        return codes


def _run_rank(
    rank: int, size: int, port: int, command: Callable[[], object], inject: Inject | None, argv: list[str]
) -> None:
    os.setsid()
    become_rank(rank, size, port)
    faulthandler.enable()
    if inject is not None:
        inject(rank)
    command()


def remove_processes(sessions: Sequence[int]) -> list[int]:
    """Kill and return the processes of the sessions that have not ended after `LEAVING` seconds."""
    deadline = time.monotonic() + LEAVING
    while (left := processes_of(sessions)) and time.monotonic() < deadline:
        time.sleep(INTERVAL)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def processes_of(sessions: Sequence[int]) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
