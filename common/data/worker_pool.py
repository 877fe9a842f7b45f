"""Worker processes that apply one function to a stream of tasks, in order; the death of one is survived."""

import multiprocessing
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import islice
from multiprocessing.process import BaseProcess
from signal import SIGTERM, Signals
from typing import Any

AHEAD = 2  # tasks for each worker that are done before they are asked for
_function: Callable[[Any], Any]  # of a worker


class WorkerPool:
    """Apply ``function`` in ``workers`` forked processes, or in this one if 0.

    Results come through pipes, not /dev/shm, which is small in containers. After a worker has died, ``failure`` names
    it, the others are killed, and this process does the remaining tasks itself, so that a run can save and end.
    """

    def __init__(self, function: Callable[[Any], Any], workers: int) -> None:
        self.function, self.workers = function, workers
        self.failure = ""
        self._pool: ProcessPoolExecutor | None = None
        self._processes: list[BaseProcess] = []

    def map(self, tasks: Iterator[Any]) -> Iterator[Any]:
        """Yield the result of each task, in order."""
        pending: deque[tuple[Any, Future[Any] | None]] = deque()
        try:
            for task in islice(tasks, max(1, AHEAD * self.workers)):
                pending.append((task, self._submit(task)))
            while pending:
                task, future = pending.popleft()
                result = self._result(task, future)
                for following in islice(tasks, 1):
                    pending.append((following, self._submit(following)))
                yield result
        finally:
            for _, future in pending:
                if future is not None:
                    future.cancel()

    def _submit(self, task: Any) -> Future[Any] | None:
        if not self.workers or self.failure:
            return None
        self._pool = self._pool or self._start()
        with suppress(BrokenProcessPool):
            return self._pool.submit(_call, task)
        self._note_failure()
        return None

    def _start(self) -> ProcessPoolExecutor:
        context, others = multiprocessing.get_context("fork"), multiprocessing.active_children()
        pool = ProcessPoolExecutor(self.workers, context, initializer=_set_function, initargs=(self.function,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork() with threads around
            pool.submit(int)  # forks all workers
        self._processes = [process for process in multiprocessing.active_children() if process not in others]
        return pool

    def _result(self, task: Any, future: Future[Any] | None) -> Any:
        if future is not None:
            with suppress(BrokenProcessPool):
                return future.result()
            self._note_failure()
        return self.function(task)

    def _note_failure(self) -> None:
        if self.failure:
            return
        deadline = time.monotonic() + 5
        exits: list[tuple[int, int | None]] = []
        while not exits and time.monotonic() < deadline:
            time.sleep(0.01)
            exits = [(p.exitcode, p.pid) for p in self._processes if p.exitcode is not None]
        # the executor ends the others
        code, pid = min(exits, key=lambda exit_: exit_[0] in (0, -SIGTERM), default=(None, None))
        how = "a process ended" if code is None else f"process {pid} {_describe_exit(code)}"
        self.failure = (
            f"DATA.workers={self.workers}: a worker has died, {how}; if that was for lack of memory, set fewer workers"
        )
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:  # which do not get the SIGTERM that the executor sends them
            process.kill()

    def close(self) -> None:
        """End the workers; kill those that do not end within seconds."""
        if self._pool is None:
            return
        self._pool.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + 5
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        self._pool = None


def _describe_exit(code: int) -> str:
    return f"was killed by {Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


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
