"""Run functions in separate processes: pieces with a time limit, and variants in interleaved rounds.

A piece is a generator function that yields rows, each saved at once. Variants are interleaved, so that other load on
the machine affects all of them alike. `common.tools.result_rows` stores the rows.
"""

import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

from common.errors import UserError
from common.files import ROOT
from common.launch.stop_signals import die_with

Row = dict[str, Any]
Rounds = Iterator[Row]  # of a variant; the work of a round is the body of ``for measured in rounds``
COMPLETE, NOT_RUN, UNFINISHED, FAILED = "complete", "not run", "unfinished", "failed"
LEAVING = 30.0  # seconds for a variant to clean up after its last round
LIMIT = 1800.0  # seconds for a variant's set-up, or a round


class NotRunError(Exception):
    """A piece needs what is not available here."""


class UnfinishedError(Exception):
    """A piece stopped before its time limit; the next call resumes it."""


class Child:
    """A process that calls ``function(connection, *args)``: forked without a GPU, else a new interpreter."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        # a new interpreter takes seconds to import torch, but a forked process cannot use a GPU
        context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_call, args=(os.getpid(), function, theirs, args))  # pyright: ignore[reportAttributeAccessIssue]
        self._process.start()
        theirs.close()

    def receive(self, seconds: float) -> Any:
        """Return the next message; raise EOFError if the process has ended, TimeoutError after ``seconds``."""
        until = time.monotonic() + seconds
        # its children may hold the pipe open after its end
        while not self.connection.poll(min(1.0, max(0.0, until - time.monotonic()))):
            if not self._process.is_alive() and not self.connection.poll():
                raise EOFError
            if time.monotonic() > until:
                raise TimeoutError
        with suppress(ConnectionError):
            return self.connection.recv()
        raise EOFError

    def end(self, grace: float = 0.0) -> int:
        """Wait ``grace`` seconds, then kill the process and all its children; return its exit code."""
        self.connection.close()
        self._process.join(grace)
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        with suppress(ProcessLookupError, PermissionError):  # its group is gone, or not yet made
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        return self._process.exitcode


def _call(parent: int, function: Callable[..., None], connection: Connection, args: tuple[Any, ...]) -> None:
    os.setsid()
    die_with(parent)
    function(connection, *args)


def run_piece(
    piece: Callable[..., Iterator[Row]], *args: Any, seconds: float, save: Callable[[Row], None]
) -> tuple[str, str | None]:
    """Call ``piece(*args)`` in a process, and ``save`` with each row; return its status and the reason.

    A piece fails where a row has a key ``wrong``, which says why. The process and its children are killed after
    ``seconds``, and when this one is interrupted.
    """
    until = time.monotonic() + seconds
    child = Child(_send_rows, piece, args)
    try:
        while isinstance(message := child.receive(until - time.monotonic()), dict):
            save(message)
        return message
    except TimeoutError:
        return FAILED, f"killed after its limit of {seconds:.0f} s"
    except EOFError:
        return FAILED, f"its process ended with exit code {child.end(1.0)}"
    finally:
        child.end()


def _send_rows(connection: Connection, piece: Callable[..., Iterator[Row]], args: tuple[Any, ...]) -> None:
    end: tuple[str, str | None] = COMPLETE, None
    wrong: list[str] = []
    try:
        for row in piece(*args):
            connection.send(row)
            wrong += [row["wrong"]] if "wrong" in row else []
        if wrong:
            end = FAILED, "; ".join(wrong)
    except NotRunError as reason:
        end = NOT_RUN, str(reason)
    except UnfinishedError as reason:
        end = UNFINISHED, str(reason)
    except Exception as error:
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        is_ours = any((folder / missing.partition(".")[0]).exists() for folder in (ROOT, ROOT / "scripts"))
        end = (FAILED, traceback.format_exc()) if is_ours else (NOT_RUN, f"needs {missing}")
    connection.send(end)
    sys.stdout.flush()
    os._exit(0)  # no clean-up, which a broken CUDA context would hang


def _do_rounds(connection: Connection) -> Rounds:
    """Yield a measurement for each round that the parent asks for; send it, with the round's times, when it is done."""
    connection.send({})  # ready
    while connection.recv():
        started, used = time.perf_counter(), cpu_seconds()
        measured: Row = {}
        yield measured
        connection.send({"wall": time.perf_counter() - started, "cpu": cpu_seconds() - used} | measured)


@contextmanager
def in_processes(variants: Mapping[str, Callable[[Rounds], None]]) -> Iterator[dict[str, Callable[[], Row]]]:
    """Start each variant in a process; yield a function for each that does a round, for `interleave`.

    All have completed their set-up before the first round. A `UserError` of a variant is raised here. On exit, a
    variant that does not end within `LEAVING` seconds is killed.
    """
    children: dict[str, Child] = {}
    try:
        for name, variant in variants.items():
            children[name] = Child(_run_variant, variant)
        for name, child in children.items():
            _answer(name, child)
        yield {name: partial(_do_round, name, child) for name, child in children.items()}
    finally:
        for child in children.values():
            with suppress(OSError):  # it has ended already
                child.connection.send(False)
        for child in children.values():
            child.end(LEAVING)


def _run_variant(connection: Connection, variant: Callable[[Rounds], None]) -> None:
    with suppress(EOFError, ConnectionError):  # another variant has failed
        try:
            variant(_do_rounds(connection))
        except UserError as error:
            connection.send(error)


def _do_round(name: str, child: Child) -> Row:
    child.connection.send(True)
    return _answer(name, child)


def _answer(name: str, child: Child) -> Row:
    try:
        answer = child.receive(LIMIT)
    except EOFError as error:
        raise UserError(f"{name} failed: its own message is above") from error
    except TimeoutError as error:
        raise UserError(f"{name} failed: no answer within {LIMIT:.0f} s") from error
    if isinstance(answer, UserError):
        raise answer
    return answer


def interleave(variants: Mapping[str, Callable[[], Row]], rounds: int) -> dict[str, list[Row]]:
    """Call every variant once a round, in rotating order; return each one's measurements."""
    names = list(variants)
    measured: dict[str, list[Row]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            measured[name].append(variants[name]())
    return measured


def timed(work: Callable[[], Any]) -> Row:
    """Return the ``wall`` and ``cpu`` seconds of the work."""
    started, used = time.perf_counter(), cpu_seconds()
    work()
    return {"wall": time.perf_counter() - started, "cpu": cpu_seconds() - used}


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children, running or ended."""
    total = time.process_time()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total += ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return total
