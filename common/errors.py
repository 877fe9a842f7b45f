"""Mistakes of the user's, how every command of the project reports them, and what else it
prints.
"""

import argparse
import difflib
import os
import re
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

# seconds in which the first process can speak before a launcher ends it because another has left
PATIENCE = 5.0
AT_END = ExitStack()  # what `run_command` undoes, whatever ends its main function
# What an error means to the user, "" for one that it does not know.
EXPLAIN: list[Callable[[Exception], str]] = [lambda error: _explain_os_error(error)]
# Control characters, line separators, overrides of the direction of text, and bytes that are not
# UTF-8.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Variables(NamedTuple):
    """The environment variables in which a launcher tells a process its place."""

    rank: str
    local_rank: str
    world_size: str
    host: str = ""  # of rank 0
    port: str = ""
    local_size: str = ""  # the processes on this node
    job: str = ""  # a job's own name, from which its port is derived


LAUNCHERS = {  # where several apply, the first one started the process
    "torch": Variables("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "openmpi": Variables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job="PMIX_NAMESPACE",
    ),
    # mpiexec of MPICH and Intel MPI
    "mpich": Variables("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", local_size="MPI_LOCALNRANKS"),
    # mpiexec of HPE Cray
    "pals": Variables(
        "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE", local_size="PMI_LOCAL_SIZE", job="PALS_APID"
    ),
    "slurm": Variables("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
}


class UserError(ValueError):
    """A mistake that the user can fix: the message names the key or file, its value and the remedy,
    in one line.
    """


class RankError(UserError):
    """A mistake that not all processes of a run see: each that sees it prints it."""


class AgreedError(UserError):
    """What all processes of a run raise together: only the first prints it."""


def printable(text: object) -> str:
    """Return ``text`` in one line, with what is `UNPRINTABLE` in it escaped."""
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def print_wrapped(text: str, indent: int = 4, *, is_warning: bool = False) -> None:
    """Print ``text`` in lines of at most 80 columns, the later ones indented, but for longer words
    such as paths.
    """
    wrap = textwrap.TextWrapper(
        80,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
    )
    print(wrap.fill(printable(text)), file=sys.stderr if is_warning else sys.stdout, flush=True)


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table for the terminal, which is Markdown too."""
    cells = [list(rows[0]), *([printable(value) for value in row.values()] for row in rows)]
    widths = [
        max(2, *map(len, column)) for column in zip(*cells, strict=True)
    ]  # Markdown needs a dash
    lines = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, or an empty string."""
    lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return f"; did you mean {lower[near[0]]!r}?" if near else ""


def counted(number: int, unit: str) -> str:
    """Return ``number`` with its unit, as "1 process" or "2 processes"."""
    return f"{number} {unit}{'' if number == 1 else 'es' if unit.endswith('s') else 's'}"


def list_some(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and how many more there are, as "a, b and 3 more"."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_line(error: BaseException) -> str:
    """Return the first line of what ``error`` says, or the name of its type if it says nothing."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)


def nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of ``unit`` next to ``value``, which is none, as ``"4 or 8"``."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def command_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints ``description`` as it is, with the ``--debug`` of
    `run_command`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback for user errors too")
    return parser


def run_command(main: Callable[[list[str]], object], argv: list[str] | None = None) -> None:
    """Run ``main(argv)``; a `UserError` ends the process with one line on stderr and exit code 2.

    ``--debug`` anywhere in the arguments shows the traceback instead. Ctrl-C and a standard output
    that is closed, as by ``| head``, end the process without a traceback.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        main(argv)
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # for what Python flushes at its exit
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        if not isinstance(error, UserError):
            line = next((line for explain in EXPLAIN if (line := explain(error))), None)
            error = line and RankError(line)
        if not error or "--debug" in argv:
            raise
        _report(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        AT_END.close()


def _explain_os_error(error: Exception) -> str:
    """Return the file and what is wrong with it; semaphores, which name no file, are in
    /dev/shm.
    """
    if not isinstance(error, OSError):
        return ""
    if error.filename:
        return f"{error.filename}: {error.strerror}"
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.filename.endswith("multiprocessing/synchronize.py") for frame in frames):
        return (
            f"/dev/shm: {error.strerror}: worker processes need to write to it; start the "
            "container with --ipc=host or --shm-size=1g, or train with DATA.workers=0"
        )
    return ""


def _report(error: UserError) -> None:
    """Print ``error`` once for the processes that share it.

    Before the processes of a run have joined they may all see the same mistake: the first speaks at
    once, and ends the run; others speak if that has not ended them, or at once of a `RankError`. An
    `AgreedError` is the first's to say.
    """
    distributed = sys.modules.get(
        "torch.distributed"
    )  # tools that do not train do not import torch
    has_joined = distributed is not None and distributed.is_initialized()
    if not (has_joined or is_first_process() or isinstance(error, RankError)):
        time.sleep(PATIENCE)
    if is_first_process() or not isinstance(error, AgreedError):
        if tqdm := sys.modules.get("tqdm"):
            for bar in list(getattr(tqdm.tqdm, "_instances", ())):
                bar.close()
        sys.stderr.write(
            f"error: {printable(error)}\n"
        )  # one write, unlike print, since ranks share stderr


def is_first_process() -> bool:
    """Return whether this process is the first of those that its launcher started, as far as the
    environment says.

    A process with an invalid rank counts as first, so that it prints its own error.
    """
    for variables in LAUNCHERS.values():
        rank, size = map(os.environ.get, (variables.rank, variables.world_size))
        if rank and size:
            return not (rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size))
    return True
