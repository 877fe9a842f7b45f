"""Errors that users can fix, and how every command of the project reports them."""

import argparse
import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from common.launchers import is_first_process
from common.process import Stopped, exit_stopped, is_script, script_scope
from common.text import printable

# Seconds that the other processes wait: a launcher ends the first once another has left, and it has
# to print its line before.
PATIENCE = 5.0
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last: a limit on the size of files
Explanation = Callable[[Exception], str]
_explanations: list[Explanation] = []


class UserError(ValueError):
    """A mistake that the user can fix.

    The message is one line: the key or file, its value and the remedy. ``status`` is the exit
    status of a script that it ends.
    """

    status = 2  # as argparse after a wrong command line


class PartialError(UserError):
    """Of several items that were asked for, some failed: the others are done."""

    def __init__(self, message: str, status: int = 1):
        super().__init__(message)
        self.status = status


class RankError(UserError):
    """A mistake that not all processes of a run see: each that sees it prints it."""


class AgreedError(UserError):
    """What all processes of a run raise together: only the first prints it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if is_script():
            super().error(message)
        raise UserError(message)


def command_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the ``--debug`` of `run_command`; it keeps the lines of the text.

    Called from Python, it raises `UserError` for a wrong argument.
    """
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debug", action="store_true", help="show a traceback for user errors too")
    return parser


def at_least_1(text: str) -> int:
    """Return the number that ``text``, an argument of a command, is."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected an integer >= 1")
    return int(text)


def explain_errors(*explanations: Explanation) -> None:
    """Have `run_command` ask these functions what an error means that is no `UserError`.

    Each returns one line with the remedy, "" for an error that it does not know. They replace those
    of an earlier call.
    """
    _explanations[:] = explanations


def run_command(main: Callable[[list[str]], object], argv: list[str] | None = None) -> None:
    """Run ``main(argv)`` as a script, which a `UserError` ends with one line and its ``status``.

    ``--debug`` anywhere in the arguments shows the traceback instead. Signals and a standard output
    that is closed, as by ``| head``, end the process without a traceback.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # as `common` sets it for the imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with script_scope():
        _run_script(main, sys.argv[1:] if argv is None else argv)


def _run_script(main: Callable[[list[str]], object], argv: list[str]) -> None:
    try:
        main(argv)
        # What is buffered is written here, where a closed pipe and a full disk are handled.
        print(end="", flush=True)
    except BrokenPipeError:
        _end_output()
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        mistake = error if isinstance(error, UserError) else _explain(error)
        if mistake is None or "--debug" in argv:
            raise
        _report(mistake)
        _end_output()
        sys.exit(mistake.status)
    except Stopped as stopped:
        exit_stopped(stopped.number)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _end_output() -> None:
    """Write what is buffered, and let go of a standard output that does not take it."""
    try:
        print(end="", flush=True)
    except OSError:
        # Python flushes it once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain(error: Exception) -> RankError | None:
    """Return what ``error`` means to the user, None if nothing here knows it."""
    for explanation in (_explain_os_error, *_explanations):
        line = explanation(error)
        if line:
            return RankError(line)
    return None


def _explain_os_error(error: Exception) -> str:
    if not isinstance(error, OSError):
        return ""
    if error.filename:
        return f"{error.filename}: {error.strerror}"
    # Semaphores, which name no file, are in /dev/shm. Other errors, as of a closed pipe, stay.
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.filename.endswith("multiprocessing/synchronize.py") for frame in frames):
        return (
            f"/dev/shm: {error.strerror}: worker processes need to write to it; start the "
            "container with --ipc=host or --shm-size=1g, or train with DATA.workers=0"
        )
    if error.errno in DISK_FULL:
        return f"output cannot be written ({error.strerror}); free space or write elsewhere"
    return ""


def _report(error: UserError) -> None:
    """Print ``error`` once for the processes that share it.

    Before the processes of a run have joined they may all see the same mistake: the first speaks at
    once, and ends the run; others speak if that has not ended them, or at once of a `RankError`. An
    `AgreedError` is the first's to say.
    """
    # Not imported here: tools that do not train would have to load them.
    distributed = sys.modules.get("torch.distributed")
    has_joined = distributed is not None and distributed.is_initialized()
    if not (has_joined or is_first_process() or isinstance(error, RankError)):
        time.sleep(PATIENCE)
    if isinstance(error, AgreedError) and not is_first_process():
        return
    tqdm = sys.modules.get("tqdm")
    if tqdm:
        # A progress bar would be drawn again over the message.
        for bar in list(getattr(tqdm.tqdm, "_instances", ())):
            bar.close()
    # One write, which `print` does not promise: ranks share stderr.
    sys.stderr.write(f"error: {printable(error)}\n")
