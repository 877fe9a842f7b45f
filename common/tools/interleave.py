"""Measure variants in turns, so that whatever else the machine does meets all of them alike."""

import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil

from common.errors import UserError

Figures = dict[str, Any]
LEAVING = 30.0  # seconds in which a variant may clean up after its last turn


def take_turns(variants: Mapping[str, Callable[[], Figures]], rounds: int) -> dict[str, list[Figures]]:
    """Call every variant once a round, in an order that moves on by one each round; return each one's figures."""
    names = list(variants)
    figures: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            figures[name].append(variants[name]())
    return figures


def timed(work: Callable[[], Any]) -> Figures:
    """Do the work; return its ``wall`` and ``cpu`` seconds."""
    started, used = time.perf_counter(), cpu_seconds()
    work()
    return {"wall": time.perf_counter() - started, "cpu": cpu_seconds() - used}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it started: ended and waited for, or still there."""
    total = time.process_time()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total += ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return total


class Turns:
    """A variant's turns, in a process of its own: a round's work is the body of ``for turn in turns``.

    Between its turns it waits. What it puts into ``turn``, a dict, is added to the figures of `timed`. Where the loop
    is somebody else's, `start` and `stop` enclose a round's work instead.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._started: float | None = None

    def start(self) -> bool:
        """Wait for the next turn; return whether there is one."""
        if self._started is None:
            self._connection.send({})  # ready
        if self._connection.recv():
            self._started, self._used = time.perf_counter(), cpu_seconds()
            return True
        return False

    def stop(self, figures: Figures) -> None:
        """Hand in the figures of this turn."""
        times = {"wall": time.perf_counter() - self._started, "cpu": cpu_seconds() - self._used}
        self._connection.send(times | figures)

    def __iter__(self) -> Iterator[Figures]:
        while self.start():
            turn: Figures = {}
            yield turn
            self.stop(turn)


@contextmanager
def in_processes(variants: Mapping[str, Callable[[Turns], None]]) -> Iterator[dict[str, Callable[[], Figures]]]:
    """Start each variant in a process of its own; yield what gives one its turn, for `take_turns`.

    All have set themselves up, and wait for their first turn, before the first is measured. A `UserError` of a variant
    is raised here. On exit, one that has not ended after `LEAVING` seconds is killed.
    """
    context = multiprocessing.get_context("spawn")  # a process that is forked cannot use a GPU
    processes, connections = [], {}
    try:
        for name, variant in variants.items():
            connections[name], theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, variant))
            process.start()
            theirs.close()
            processes.append(process)
        for name, connection in connections.items():
            _receive(name, connection)
        yield {name: partial(_ask, name, connection) for name, connection in connections.items()}
    finally:
        for connection in connections.values():
            with suppress(OSError):  # it has ended already
                connection.send(False)
            connection.close()
        for process in processes:
            process.join(LEAVING)
            process.kill()
            process.join()


def _serve(connection: Connection, variant: Callable[[Turns], None]) -> None:
    try:
        variant(Turns(connection))
    except UserError as error:
        with suppress(OSError):  # the parent is gone, with another variant's
            connection.send(error)
    except (EOFError, ConnectionError):  # the parent is gone
        pass


def _ask(name: str, connection: Connection) -> Figures:
    connection.send(True)
    return _receive(name, connection)


def _receive(name: str, connection: Connection) -> Figures:
    try:
        answer = connection.recv()
    except (EOFError, ConnectionError) as error:
        raise UserError(f"{name} failed: what its process says is above") from error
    if isinstance(answer, UserError):
        raise answer
    return answer
