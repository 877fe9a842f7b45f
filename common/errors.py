"""Mistakes of the user's, and how every command of the project reports them."""

import argparse
import difflib
import io
import json
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

PATIENCE = 5.0  # seconds in which the first process can speak before a launcher ends it because another has left
AT_END = ExitStack()  # what `run_command` undoes, whatever ends its main function
# Control characters, line separators, and bytes of a file's name that are not UTF-8.
UNWRITABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# Overrides of the direction of text too, which let a name pass for another.
UNPRINTABLE = re.compile(f"{UNWRITABLE.pattern}|[\u202a-\u202e\u2066-\u2069]")
# Paragraphs of a description that keep their lines: commands, and what is indented or in columns.
COMMANDS = re.compile(r"^ |^(\w+=\S+ )?(python|torchrun|curl) |\S {3}", re.MULTILINE)
RANK_AND_SIZE = (  # variables of torchrun, mpirun and srun
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


class UserError(ValueError):
    """A mistake that the user can fix: the message names the key or file, its value and the remedy, in one line."""


class RankError(UserError):
    """A mistake that the processes of a run do not share: each that sees it says so."""


class AgreedError(UserError):
    """What all processes of a run raise together: the first one says so."""


def printable(text: object) -> str:
    """Return ``text`` in one line that does nothing to a terminal: what is `UNPRINTABLE` in it is escaped."""
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, or an empty string."""
    lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    return f"; did you mean {lower[near[0]]!r}?" if near else ""


def counted(number: int, unit: str) -> str:
    """Return ``number`` with its unit, as "1 process" or "2 processes"."""
    return f"{number} {unit}{'' if number == 1 else 'es' if unit.endswith('s') else 's'}"


def first_line(error: BaseException) -> str:
    """Return the first line of what ``error`` says, or the name of its type if it says nothing."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


def nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of ``unit`` next to ``value``, which is none, as ``"4 or 8"``."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def command_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the ``--debug`` of `run_command`; it wraps the prose of ``description`` to the terminal."""
    width = shutil.get_terminal_size().columns - 2
    paragraphs = (description or "").replace("``", "`").strip().split("\n\n")
    wrapped = [text if COMMANDS.search(text) else textwrap.fill(text, width) for text in paragraphs]
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description="\n\n".join(wrapped), formatter_class=raw)
    parser.add_argument("--debug", action="store_true", help="show a traceback for user errors too")
    return parser


def run_command(main: Callable[[list[str]], object], argv: list[str] | None = None) -> None:
    """Run ``main(argv)``; a `UserError` ends the process with one line on stderr and exit code 2.

    ``--debug`` anywhere in the arguments shows the traceback instead. Before the processes of a run have joined they
    all see the same mistake, and only the first speaks, unless it is a `RankError`; later each speaks for itself,
    unless it is an `AgreedError`. So does a file that the system refuses. Ctrl-C, and a standard output that is
    closed or full, end the process without a traceback; what its encoding lacks is escaped.
    """
    is_whole_program, argv = argv is None, sys.argv[1:] if argv is None else argv
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # by `end_quietly_on_ctrl_c`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell, as by `>&-`
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            main(argv)
        except SystemExit as ended:
            if ended.code or not {"-h", "--help"} & set(argv):
                raise
            print()  # argparse ignores that it could not print its help
        except (OSError, RuntimeError) as error:
            refuse_path(error)
            raise
        sys.stdout.flush()
    except UserError as error:
        if "--debug" in argv:
            raise
        if is_first_process() or isinstance(error, RankError) or (_joined() and not isinstance(error, AgreedError)):
            _end_progress_bars()
            sys.stderr.write(f"error: {printable(error)}\n")  # one write, unlike print, since ranks share stderr
            _tell_torchrun(f"error: {printable(error)}")
        elif not _joined():
            time.sleep(PATIENCE)
        sys.exit(2)
    except KeyboardInterrupt:
        if "--debug" in argv:
            raise
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if not _give_up_lost_output(probe=b"\n"):
            raise
        if isinstance(error, BrokenPipeError):  # as of `| head -1`
            sys.exit(128 + signal.SIGPIPE)
        sys.stderr.write(f"error: standard output: {error.strerror}\n")
        sys.exit(2)
    finally:
        _give_up_lost_output()
        AT_END.close()
        if is_whole_program:  # all is written, and Python's own shutdown would answer Ctrl-C with a traceback
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def refuse_path(error: Exception) -> None:
    """Raise `UserError` for a file that the system refuses, as one that is too long, and for a link to itself."""
    if isinstance(error, OSError) and error.filename is not None:
        path = str(error.filename)
        shown = path[:100] + "..." * (len(path) > 100)
        raise UserError(f"{shown}: {error.strerror}; choose another path (--debug shows what needs it)") from error
    if str(error).startswith("Symlink loop"):  # by `Path.resolve` until Python 3.12
        raise UserError(f"{error}; remove the link or choose another path") from error


def end_quietly_on_ctrl_c() -> None:
    """Let Ctrl-C end a script of this repository without a traceback, until `run_command` takes over.

    Importing PyTorch takes seconds. A program of the user's that imports ours keeps its handler.
    """
    script, root = Path(sys.argv[0] or "-").resolve(), Path(__file__).resolve().parents[1]
    is_ours = script.suffix == ".py" and script.parent.parent == root
    is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours and is_pythons and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _tell_torchrun(line: str) -> None:
    """Let torchrun's own report end with ``line``; it reads the file that its ``@record`` would write."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError), open(file, "w") as report:
            extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
            json.dump({"message": {"message": line, "extraInfo": extra}}, report)


def _end_progress_bars() -> None:
    if tqdm := sys.modules.get("tqdm"):
        for bar in list(getattr(tqdm.tqdm, "_instances", ())):
            bar.close()


def _give_up_lost_output(probe: bytes = b"") -> bool:
    """Return whether standard output is closed or full; if so, discard what is left of it without a traceback."""
    try:
        sys.stdout.flush()
        if probe:
            os.write(sys.stdout.fileno(), probe)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def is_first_process() -> bool:
    """Return whether this process is the first of those that its launcher started, as far as the environment says.

    A rank that cannot be is left to speak for itself.
    """
    for place in RANK_AND_SIZE:
        rank, size = map(os.environ.get, place)
        if rank and size:
            return not (rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size))
    return True


def _joined() -> bool:
    distributed = sys.modules.get("torch.distributed")  # tools that do not train do not import torch
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
