"""Stop a run in good order: SIGTERM, SIGUSR1 (Slurm's warning), Ctrl-C and a terminal that is closed (SIGHUP)."""

import atexit
import ctypes
import math
import multiprocessing
import multiprocessing.util  # whose own function must be registered at exit before ours, to run after it
import os
import select
import signal
import threading
import time
from collections.abc import Callable

from common.errors import is_first_process

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
CHECK = 0.5  # seconds between two looks at the progress, once a signal has come
SAME_PRESS = 1.0  # seconds within which a second SIGINT is the first one, passed on by a launcher too
PR_SET_PDEATHSIG = 1


class StopSignals:
    """What to do when a signal comes: end at once, or while a run is `deferring`, note it for the training loop.

    A thread reads the signals, so that they count too while the main thread waits in C++ for another process. Worker
    processes, forked while this is installed, leave the signals to their parent, and die with it.

    Attributes:
        received: the signal that came while deferring, or 0.
        agreed: the signal that the ranks have agreed to stop for, or 0.
    """

    def __init__(self) -> None:
        self.received = self.agreed = 0
        self.deferring = False
        self._received_at = self._seen_at = 0.0
        self._seen: object = None
        self._forking = threading.local()
        self._previous: dict[int, object] = {}

    def install(
        self, follow_parent: bool = False, progress: Callable[[], object] = lambda: None, patience: float = math.inf
    ) -> None:
        """Take over the signals; to be called from the main thread.

        ``follow_parent``: get SIGTERM when the process that started this one dies. Where ``progress()`` stays the same
        for ``patience`` seconds after a signal was noted, whatever this process waits for, it ends at once.
        """
        if self._previous:
            return
        self.received = self.agreed = 0
        self._progress, self._patience = progress, patience
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # Python's own handler has nothing to do, but without it nothing is written to the pipe
        for number in SIGNALS:
            if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):  # nohup
                self._previous[number] = signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._pipe = reader, writer
        self._watcher = threading.Thread(target=self._watch, args=(reader,), daemon=True, name="stop-signals")
        self._watcher.start()
        atexit.register(_kill_children)
        if follow_parent:
            _PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)

    def restore(self) -> None:
        """Give the signals back; ignore them after a stop that was agreed, when the process is about to end.

        The first of the ranks to end lets the launcher send SIGTERM to the others: it must not change how they end.
        """
        if not self._previous:
            return
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self.agreed else handler)  # pyright: ignore[reportArgumentType]
        os.write(self._pipe[1], b"\0")  # ends the watcher, after the signals that came before
        self._watcher.join()
        for end in self._pipe:
            os.close(end)
        self._previous, self.deferring = {}, False

    def _watch(self, reader: int) -> None:
        while True:
            ready, *_ = select.select([reader], [], [], CHECK if self.received else None)
            if not ready:
                self._check_progress()
            elif (number := os.read(reader, 1)[0]) == 0:
                return
            elif number in SIGNALS:
                self._receive(number)

    def _check_progress(self) -> None:
        now, progress = time.monotonic(), self._progress()
        if progress != self._seen:
            self._seen, self._seen_at = progress, now
        elif now - max(self._seen_at, self._received_at) > self._patience:
            _say(f"{signal_name(self.received)}: no progress for {self._patience:g} s (TIMEOUT); ended at once")
            os._exit(exit_code(self.received))

    def _receive(self, number: int) -> None:
        if not self.deferring:
            _leave(number, exit_code(number))
        if not self.received:
            self.received, self._received_at = number, time.monotonic()
            if is_first_process():
                _say(f"{signal_name(number)}: stopping after this step")
        elif number == signal.SIGINT == self.received and time.monotonic() - self._received_at > SAME_PRESS:
            _leave(number, 128 + number)

    def before_fork(self) -> None:
        """Block the signals: the child would write those that come in its first moments into its parent's pipe."""
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._forking.parent = os.getpid()

    def after_fork_in_parent(self) -> None:
        """Let the signals through again."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def after_fork_in_child(self) -> None:
        """Keep the signals from the child, and let it die with its parent."""
        if self._previous:
            signal.set_wakeup_fd(-1)
            _PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._forking.parent:  # it has died already
                os._exit(1)
        else:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)


def _kill_children() -> None:
    """End the worker processes; multiprocessing would send them SIGTERM at exit, which they do not get, and wait."""
    for child in multiprocessing.active_children():
        child.kill()


def exit_code(number: int) -> int:
    """Return what a run that a signal stopped exits with: 0 after Ctrl-C, else 143, as after SIGTERM."""
    return 0 if number == signal.SIGINT else 128 + signal.SIGTERM


def signal_name(number: int) -> str:
    """Return what users call a signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _leave(number: int, code: int) -> None:
    if is_first_process():
        _say(f"{signal_name(number)}: ended at once")
    os._exit(code)


def _say(line: str) -> None:
    os.write(2, f"{line}\n".encode())  # not print: the main thread may be in the middle of one


_PRCTL = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)  # Linux alone has it
stop_signals = StopSignals()
os.register_at_fork(
    before=stop_signals.before_fork,
    after_in_parent=stop_signals.after_fork_in_parent,
    after_in_child=stop_signals.after_fork_in_child,
)
