"""Run one function over many tasks on all cores."""

import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from common.data.worker_pool import follow_parent
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
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start) as pool:
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


def _start() -> None:
    """End quietly on Ctrl-C, and with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    follow_parent()
