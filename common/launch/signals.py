"""Stop a run cleanly on SIGTERM, SIGUSR1 (Slurm's warning), Ctrl-C and SIGHUP (a closed terminal).

``python -m common.launch.signals`` takes torchrun's arguments: see `run_torchrun`.
"""

import atexit
import ctypes
import logging
import math
import multiprocessing
import multiprocessing.util  # registers its atexit function before ours, to run after it
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from common.launchers import is_first_process
from common.process import Stopped, at_end, exit_code, is_script

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
CHECK = 0.5  # seconds between two progress checks after a signal
# Seconds. torchrun sends SIGTERM when another rank has died, and kills 30 s later.
TORCHRUN_PATIENCE = 25.0
SAME_PRESS = 1.0  # seconds within which a second SIGINT is the first one, forwarded by a launcher
PR_SET_PDEATHSIG = 1
MISTAKE = 2  # exit status of a training script after its own error message


class StopSignals:
    """Exit immediately on a signal; while `deferring`, record it for the training loop instead.

    A thread reads the signals, so that they also take effect while the main thread waits in C++.
    In a process that is no script's, they raise `Stopped` in the main thread in place of an exit.
    Forked worker processes ignore them, and die with their parent.

    Attributes:
        received: the signal recorded while deferring, or 0.
        agreed: the signal for which the ranks have agreed to stop, or 0.
    """

    def __init__(self):
        self.received = self.agreed = 0
        self.deferring = False
        self._received_at = self._seen_at = 0.0
        self._seen: object = None
        self._forking = threading.local()
        self._previous: dict[int, Any] = {}

    def install(
        self,
        follow_parent: bool = False,
        progress: Callable[[], object] = lambda: None,
        patience: float = math.inf,
    ) -> None:
        """Install the handlers, once, until `restore` or the end of the main function.

        In another thread than the main one it does nothing: Python takes no handlers there.

        Args:
            follow_parent: get SIGTERM when the parent process, torchrun or mpirun, dies.
            progress: a number that changes while the process makes progress.
            patience: seconds without progress after a recorded signal, after which the process
                exits; under torchrun `TORCHRUN_PATIENCE` at most.
        """
        if self._previous:
            return
        self.received = 0
        self.agreed = 0
        self.deferring = False
        if threading.current_thread() is not threading.main_thread():
            return
        at_end(self.restore)
        self._progress = progress
        is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        self._patience = min(patience, TORCHRUN_PATIENCE) if is_torchrun else patience
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in SIGNALS:
            is_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not is_nohup:
                # Without a handler Python writes nothing to the pipe.
                self._previous[number] = signal.signal(number, self._handle)
        self._previous_pipe = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._pipe = reader, writer
        self._watcher = threading.Thread(
            target=self._watch, args=(reader,), daemon=True, name="stop-signals"
        )
        self._watcher.start()
        # They are blocked if this process was forked from one with handlers
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        atexit.register(_kill_children)
        if follow_parent:
            _PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)

    def restore(self) -> None:
        """Restore the previous handlers; in a script that stops as agreed, ignore the signals.

        When the first rank ends, the launcher sends SIGTERM to the others, which must not change
        their exit codes.
        """
        if not self._previous or threading.current_thread() is not threading.main_thread():
            return
        signal.set_wakeup_fd(self._previous_pipe)
        ignores = self.agreed and is_script()
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if ignores else handler)
        os.write(self._pipe[1], b"\0")  # ends the watcher, after earlier signals
        self._watcher.join()
        for end in self._pipe:
            os.close(end)
        self._previous = {}
        self.deferring = False
        if not multiprocessing.active_children():
            atexit.unregister(_kill_children)

    def _handle(self, number: int, _: object) -> None:
        """Do in the main thread what the watcher does in a script."""
        if self._ends_now(number) and not is_script():
            raise Stopped(number)

    def _watch(self, reader: int) -> None:
        """Read the numbers of signals from the pipe, until a 0."""
        while True:
            ready, *_ = select.select([reader], [], [], CHECK if self.received else None)
            if not ready:
                self._check_progress()
                continue
            number = os.read(reader, 1)[0]
            if number == 0:
                return
            # Others with a handler in Python, such as SIGCHLD, write to the pipe too.
            if number in SIGNALS:
                self._receive(number)

    def _check_progress(self) -> None:
        """Exit if the training loop does not come to the end of its step."""
        now = time.monotonic()
        progress = self._progress()
        if progress != self._seen:
            self._seen = progress
            self._seen_at = now
        elif is_script() and now - max(self._seen_at, self._received_at) > self._patience:
            _say(f"{signal_name(self.received)}: no progress for {self._patience:g} s; exiting")
            # sys.exit would not end the main thread, which may wait in C++ forever.
            os._exit(exit_code(self.received))

    def _receive(self, number: int) -> None:
        """Exit, or record the signal."""
        if self._ends_now(number):
            if is_script():
                _leave(number)
        elif not self.received:
            # The time is set first: another thread reads it once `received` is set.
            self._received_at = time.monotonic()
            self.received = number
            if is_first_process():
                _say(f"{signal_name(number)}: stopping after this step")

    def _ends_now(self, number: int) -> bool:
        """Return whether a signal is not recorded: nothing waits for it, or a second Ctrl-C."""
        is_second = number == signal.SIGINT == self.received
        is_second = is_second and time.monotonic() - self._received_at > SAME_PRESS
        return not self.deferring or is_second

    def before_fork(self) -> None:
        """Block the signals, which the child would otherwise write into its parent's pipe.

        Until the fork is over, handlers only delay: Python drops what is raised in these callbacks.
        """
        self._forking.handlers = {}
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._forking.handlers[number] = handler
                    signal.signal(number, _delay)
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._forking.parent = os.getpid()

    def after_fork_in_parent(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._forking.handlers.items():
            signal.signal(number, handler)

    def after_fork_in_child(self) -> None:
        """Make the child ignore the signals and die with its parent."""
        self._restore_handlers()
        if self._previous:
            signal.set_wakeup_fd(-1)
            self._previous = {}  # the child may `install` for itself
            _PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._forking.parent:
                # The parent has ended already: prctl came too late.
                os._exit(1)
        else:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)


def _delay(number: int, _: object) -> None:
    """Send the signal again a little later."""
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()


def _kill_children() -> None:
    """Kill the worker processes.

    At exit multiprocessing would send SIGTERM, which they ignore, and wait.
    """
    for child in multiprocessing.active_children():
        child.kill()


def signal_name(number: int) -> str:
    """Return the name to print for a signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _leave(number: int) -> None:
    """Exit at once, whatever the main thread waits for."""
    if is_first_process():
        _say(f"{signal_name(number)}: exiting")
    os._exit(exit_code(number))


def _say(line: str) -> None:
    """Print a line from the watcher's thread."""
    with suppress(OSError):  # stderr may be closed
        # `print` would wait for a lock that the main thread may hold.
        os.write(2, f"{line}\n".encode())


_PRCTL = ctypes.CDLL(None).prctl  # exists on Linux only
stop_signals = StopSignals()
os.register_at_fork(
    before=stop_signals.before_fork,
    after_in_parent=stop_signals.after_fork_in_parent,
    after_in_child=stop_signals.after_fork_in_child,
)


def run_torchrun(arguments: list[str]) -> None:
    """Run torchrun without its traceback, some 45 lines.

    A training script that exits with `MISTAKE` has said why. Signals are passed on, SIGUSR1 too,
    which would end torchrun otherwise. Under nohup SIGHUP stays ignored. The ranks divide the cores
    (`limit_threads`): torchrun would set OMP_NUM_THREADS=1.
    """
    import torch
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    # Each has a level of its own.
    for name in ("api", "errors", "errors.error_handler"):
        logger = logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}")
        logger.setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    passed_on = "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"
    # Under nohup SIGHUP is ignored: torchrun would override that.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        passed_on += ",SIGHUP"
    try:
        main([f"--signals-to-handle={passed_on}", *arguments])
    except SignalException as error:
        sys.exit(exit_code(error.sigval))
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        # The other ranks ended by torchrun's SIGTERM.
        if MISTAKE in codes:
            sys.exit(MISTAKE)
        sys.stderr.write(f"{error}\n")
        # A shell shows the end by a signal as 128 + its number: SIGKILL, -9 here, as 137.
        sys.exit(codes[0] if codes[0] > 0 else 128 - codes[0])


if __name__ == "__main__":
    run_torchrun(sys.argv[1:])
