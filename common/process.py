"""How a main function ends: as a script, or called from Python, which gets its process back.

`run_command` makes a script of it, whose process ends. A notebook, a service or a thread calls it:
then it raises exceptions only, and `ends_cleanly` undoes what it did to the process.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Stopped(KeyboardInterrupt):
    """A signal, ``number``, has stopped a main function; `except Exception` does not catch it."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class _Scope(ExitStack):
    """The functions of `at_end`, the last one first."""

    has_main = False  # whether a main function with `ends_cleanly` runs in it


# Each thread has its own.
_scope: ContextVar[_Scope | None] = ContextVar("scope", default=None)
_is_script = False


def is_script() -> bool:
    """Return whether the process is a script's, which it may end."""
    return _is_script


@contextmanager
def script_scope() -> Iterator[None]:
    """Context in which a script runs its main function."""
    global _is_script
    before = _is_script
    _is_script = True
    try:
        with _open_scope():
            yield
    finally:
        _is_script = before


@contextmanager
def _open_scope() -> Iterator[_Scope]:
    with _Scope() as scope:
        token = _scope.set(scope)
        try:
            yield scope
        finally:
            _scope.reset(token)


def ends_cleanly(main: Callable[P, R]) -> Callable[P, R]:
    """Have a main function leave the process as it was, however it ends.

    A script's is `run_command`'s to end, after the error is printed.
    """

    @functools.wraps(main)
    def clean_main(*arguments: P.args, **options: P.kwargs) -> R:
        scope = _scope.get()
        if scope and not scope.has_main:
            scope.has_main = True
            return main(*arguments, **options)
        with _open_scope() as own_scope:
            own_scope.has_main = True
            own_scope.callback(_end_monitor)
            # An exception in `no_grad`'s exit, as Ctrl-C raises it, leaves gradients off.
            torch: Any = sys.modules.get("torch")
            if torch:
                own_scope.callback(torch.set_grad_enabled, torch.is_grad_enabled())
                for device in ("cpu", "cuda"):
                    enabled = torch.is_autocast_enabled(device)
                    own_scope.callback(torch.set_autocast_enabled, device, enabled)
            return main(*arguments, **options)

    return clean_main


def _end_monitor() -> None:
    """End the thread that tqdm has for all bars, if no bar is left; the next bar starts another."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm and tqdm.monitor and not tqdm._instances:
        tqdm.monitor.exit()


def at_end(function: Callable[..., object], *arguments: object) -> None:
    """Call ``function`` when the main function ends, however it ends; do nothing outside of one."""
    scope = _scope.get()
    if scope:
        scope.callback(function, *arguments)


def set_variable(name: str, value: str | None) -> None:
    """Set an environment variable, or remove it for None, until the main function ends."""
    before = os.environ.get(name)
    if before != value:
        at_end(_write_variable, name, before)
        _write_variable(name, value)


def _write_variable(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def exit_code(number: int) -> int:
    """Return the exit status of a run that a signal has stopped: 130 for Ctrl-C, else 143.

    One status for all signals of schedulers, so that job scripts test for one.
    """
    return 128 + (number if number == signal.SIGINT else signal.SIGTERM)


def exit_stopped(number: int) -> NoReturn:
    """End this process with the status of a run that a signal has stopped."""
    if number == signal.SIGINT:
        # Ended by SIGINT itself: a shell then ends the loop or the list around it too.
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(exit_code(number))
