"""Worker processes that apply one function to a stream of tasks, in order."""

import multiprocessing
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.process import BaseProcess
from signal import SIGTERM, Signals
from typing import Any

from common.errors import UserError

AHEAD = 2  # tasks for each worker that are done before they are asked for
_function: Callable[[Any], Any]  # of a worker


class WorkerPool:
    """Apply ``function`` in ``workers`` forked processes, or in this one if 0; a worker that dies raises `UserError`.

    Results come through pipes, not /dev/shm, which is small in containers.
    """

    def __init__(self, function: Callable[[Any], Any], workers: int) -> None:
        self.function, self.workers = function, workers
        self._pool: ProcessPoolExecutor | None = None
        self._processes: list[BaseProcess] = []

    def map(self, tasks: Iterator[Any]) -> Iterator[Any]:
        """Yield the result of each task, in order."""
        if not self.workers:
            yield from map(self.function, tasks)
            return
        self._pool = self._pool or self._start()
        pending: deque[Future[Any]] = deque()
        try:
            for task in islice(tasks, AHEAD * self.workers):
                pending.append(self._pool.submit(_call, task))
            while pending:
                result = pending.popleft().result()
                for task in islice(tasks, 1):
                    pending.append(self._pool.submit(_call, task))
                yield result
        except BrokenProcessPool as error:
            raise UserError(self._describe_death()) from error
        finally:
            for future in pending:
                future.cancel()

    def _start(self) -> ProcessPoolExecutor:
        context, others = multiprocessing.get_context("fork"), multiprocessing.active_children()
        pool = ProcessPoolExecutor(self.workers, context, initializer=_set_function, initargs=(self.function,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork() with threads around
            pool.submit(int)  # forks all workers
        self._processes = [process for process in multiprocessing.active_children() if process not in others]
        return pool

    def _describe_death(self) -> str:
        codes = {process.pid: process.exitcode for process in self._processes}
        died = {pid: code for pid, code in codes.items() if code not in (None, 0, -SIGTERM)}  # which ends the others
        how = [
            f"process {pid} " + (f"was killed by {Signals(-code).name}" if code < 0 else f"ended with status {code}")
            for pid, code in died.items()
        ]
        return (
            f"DATA.workers={self.workers}: a worker has died, {' and '.join(how) or 'a process ended'}; if that was "
            "for lack of memory, set fewer workers"
        )

    def close(self) -> None:
        """End the workers."""
        for process in self._processes:
            process.kill()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _set_function(function: Callable[[Any], Any]) -> None:
    import torch  # seconds, which processes that only `follow_parent` do not need

    global _function
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    _function = function
    follow_parent()


def _call(task: Any) -> Any:
    return _function(task)


def follow_parent() -> None:
    """End this worker with its parent, even if that is killed: an orphan would wait for tasks forever."""

    def wait_for_parent() -> None:
        multiprocessing.parent_process().join()  # pyright: ignore[reportOptionalMemberAccess]
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()
