"""Runs of several processes, forked from this one so that they need not import torch again, and what starts them."""

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from common.testing.ranks import free_port

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
        self.started = time.monotonic()
        port = free_port()
        self.files = [folder / f"rank{rank}.txt" for rank in range(max(1, size))]
        self.pids = [self._fork(rank, size, port, command, inject) for rank in range(max(1, size))]
        self.codes: list[int | None] = [None] * len(self.pids)
        self.ends = [0.0] * len(self.pids)

    def _fork(self, rank: int, size: int, port: int, command: Callable[[], object], inject: Inject | None) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            return pid
        code = 1
        try:
            os.setsid()
            output = os.open(self.files[rank], os.O_WRONLY | os.O_CREAT)
            for stream, number in (("stdout", 1), ("stderr", 2)):
                os.dup2(output, number)
                setattr(sys, stream, os.fdopen(number, "w", buffering=1, closefd=False))  # pytest has put others there
            sys.__stderr__ = sys.stderr
            become_rank(rank, size, port)
            if inject is not None:
                inject(rank)
            command()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def send(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to ranks, by default to all."""
        for rank in range(len(self.pids)) if ranks is None else ranks:
            if self.codes[rank] is None:
                os.kill(self.pids[rank], number)

    def wait(self, lost: int | None = None, grace: float = IMPATIENT) -> Ended:
        """Wait for the end of all. As a launcher, end the others where one fails, by force after ``grace`` seconds.

        With a rank that is ``lost``, there is no launcher, and that rank is killed after the end of all others.
        """
        deadline, killing_at = self.started + LIMIT, float("inf")
        while not self._reap():
            now = time.monotonic()
            if lost is not None:
                if None not in self.codes[:lost] + self.codes[lost + 1 :]:
                    self.send(signal.SIGKILL, [lost])
            elif killing_at == float("inf") and any(self.codes):
                self.send(signal.SIGTERM)
                killing_at = now + grace
            if now > min(deadline, killing_at):
                self.send(signal.SIGKILL)
            time.sleep(INTERVAL)
        seconds = time.monotonic() - self.started
        left = self._remove_left()
        outputs = [file.read_text(errors="replace") if file.exists() else "" for file in self.files]
        expect(seconds <= LIMIT, f"the run did not end within {LIMIT:g} s: {outputs}")
        return Ended([code or 0 for code in self.codes], outputs, seconds, self.ends, left)

    def _reap(self) -> bool:
        for rank, pid in enumerate(self.pids):
            if self.codes[rank] is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
                    self.ends[rank] = time.monotonic()
        return None not in self.codes

    def _remove_left(self) -> list[int]:
        deadline = time.monotonic() + LEAVING
        while (left := processes_of(self.pids)) and time.monotonic() < deadline:
            time.sleep(INTERVAL)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


def become_rank(rank: int, size: int, port: int) -> None:
    """Set the environment as torchrun does; of ``size`` 0, as nobody does. GPUs are hidden."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMIX_"))]:
        del os.environ[name]
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} if size else {})
    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0
    torch.set_num_threads(1)
    faulthandler.enable()


def processes_of(sessions: Sequence[int]) -> list[int]:
    """Return the processes of the sessions that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session, *_ = path.read_text().rpartition(")")[2].split()
            if state != "Z" and int(session) in sessions:
                found.append(int(path.parent.name))
    return found
