"""Run one function over many tasks on all cores."""

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from common.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")
AHEAD = 3


def parallel_map(function: Callable[[Task], Result], tasks: Iterable[Task], workers: int) -> Iterator[Result]:
    """Yield ``function(task)`` of each task as it completes, in any order, from `workers` spawned processes.

    `AHEAD` tasks for each worker are taken ahead. With one worker, this process does the work. Workers end with this
    process, however it ends.
    """
    if workers == 1:
        yield from map(function, tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_follow_parent) as pool:
        pending: set[Future[Result]] = set()
        remaining = iter(tasks)
        try:
            while True:
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited while a worker imports
                try:
                    taken = itertools.islice(remaining, AHEAD * workers - len(pending))
                    pending |= {pool.submit(function, task) for task in taken}
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                if not pending:
                    return
                completed, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in completed:
                    yield future.result()
        except BrokenProcessPool as error:
            raise UserError(
                f"--workers={workers}: a worker process died, perhaps for lack of memory; "
                "rerun the command with fewer workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """End quietly on Ctrl-C, and with the parent even if it is killed: an orphan would wait for its queue forever."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def wait_for_parent() -> None:
        multiprocessing.parent_process().join()  # pyright: ignore[reportOptionalMemberAccess]
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()
