"""Threads that read records ahead of their use, and processes that decode them, both in order."""

import gc
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from signal import SIGTERM
from typing import Any, NamedTuple

import numpy as np

from common.data.image_split import ImageSplit, Record
from common.data.sampler import PADDING, Draw
from common.errors import UserError

# More threads than cores, because they wait for the disk. Each reads many records, because the GIL
# bounds them where the records come from memory.
READING_THREADS = 16
RECORDS_PER_READ = 64  # records that a thread reads one by one, for draws without spans
DRAWS_AHEAD = 3
BYTES_AHEAD = 128_000_000
MOST_DRAWS_AHEAD = 64
AHEAD = 2  # tasks for each worker that are done before they are asked for

Reading = Future[Sequence[Record]]


class _Pending(NamedTuple):
    draw: Draw
    readings: list[tuple[Reading, int]]  # each sample's future, and its position in the result
    nbytes: int  # bytes that this draw was the first to need


class RecordReader:
    """Yield draws with their records while the next are read; keep a span until its last use.

    At least `DRAWS_AHEAD` draws are ahead, and more of them up to `BYTES_AHEAD` and
    `MOST_DRAWS_AHEAD`. Bad records are yielded as errors. ``for_workers`` yields bytes, which can
    be sent to a `WorkerPool`, and no records of draws without spans, which its processes read.
    """

    def __init__(self, split: ImageSplit, for_workers: bool = False):
        self.split = split
        self.for_workers = for_workers
        self._pool = ThreadPoolExecutor(READING_THREADS, thread_name_prefix="record-reader")

    def read(self, draws: Iterator[Draw]) -> Iterator[tuple[Draw, list[Record]]]:
        """Yield each draw and the records of its samples, without padding, in order."""
        shared: dict[int, Reading] = {}  # spans, by their first record
        pending: deque[_Pending] = deque()
        for draw in draws:
            if self.for_workers and draw.spans is None:
                yield draw, []
                continue
            pending.append(self._begin(draw, shared))
            nbytes = sum(each.nbytes for each in pending)
            if len(pending) > DRAWS_AHEAD and (
                nbytes > BYTES_AHEAD or len(pending) > MOST_DRAWS_AHEAD
            ):
                yield self._finish(pending.popleft())
        while pending:
            yield self._finish(pending.popleft())

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, draw: Draw, shared: dict[int, Reading]) -> _Pending:
        """Submit the reading of a draw; ``shared`` are the spans that other draws need, too."""
        indices = draw.indices[draw.indices != PADDING]
        readings = []
        nbytes = 0
        if draw.spans is None:
            for part in np.split(indices, range(RECORDS_PER_READ, len(indices), RECORDS_PER_READ)):
                future = self._pool.submit(self._read_each, part.tolist())
                nbytes += sum(self.split.span_bytes(index, index + 1) for index in part.tolist())
                readings += [(future, number) for number in range(len(part))]
            return _Pending(draw, readings, nbytes)
        # Padding comes last and has spans too: `zip` ends at the last sample.
        spans = draw.spans.tolist()
        for index, (first, end, is_last) in zip(indices.tolist(), spans, strict=False):
            if first not in shared:
                shared[first] = self._pool.submit(self.split.read_span, first, end)
                nbytes += self.split.span_bytes(first, end)
            readings.append((shared[first], index - first))
            if is_last:
                # Pending draws still refer to the records; they are freed with the last of these.
                del shared[first]
        return _Pending(draw, readings, nbytes)

    def _read_each(self, indices: Sequence[int]) -> list[Record]:
        return [record for index in indices for record in self.split.read_span(index, index + 1)]

    def _finish(self, pending: _Pending) -> tuple[Draw, list[Record]]:
        """Wait for the records of a draw."""
        records: list[Record] = [future.result()[number] for future, number in pending.readings]
        if self.for_workers:
            records = [
                record if isinstance(record, UserError) else (bytes(record[0]), record[1])
                for record in records
            ]
        return pending.draw, records


@dataclass(eq=False)
class WorkerPool:
    """Apply ``function`` in ``workers`` forked processes, or in this one if 0.

    Results come through pipes, not /dev/shm, which is small in containers. Raises `UserError` if a
    worker dies.
    """

    function: Callable[[Any], Any]
    workers: int
    _pool: ProcessPoolExecutor | None = None

    def map(self, tasks: Iterator[Any]) -> Iterator[Any]:
        """Yield the result of each task, in order, once the workers are there."""
        if not self.workers:
            yield from map(self.function, tasks)
            return
        assert self._pool
        pending: deque[Future[Any]] = deque()
        try:
            for task in tasks:
                pending.append(self._pool.submit(_call, task))
                if len(pending) > AHEAD * self.workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            # A private name, as in `close`: the pool has no other that tells its processes.
            processes = self._pool._processes.values()
            for process in processes:
                process.join(1)  # A worker's pipe closes before its exit status is there.
            # The pool has ended the others with SIGTERM.
            ended = {process.exitcode for process in processes} - {None, 0, -SIGTERM}
            raise UserError(
                f"DATA.workers={self.workers}: a worker has died, status "
                f"{', '.join(map(str, ended))}; if that was for lack of memory (-9), set fewer "
                "workers"
            ) from error

    def start(self) -> None:
        """Fork the workers, unless they are there; they end with this process."""
        if self.workers and not self._pool:
            context = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(self.workers, context, _set_function, (self.function,))
            self._pool.submit(int)  # any task: the first one forks all workers

    def close(self) -> None:
        """End the workers."""
        if self._pool:
            # A worker may be in the middle of an image: its result is not wanted. With this lock
            # none is in the middle of writing one, of which `shutdown` would wait for the rest.
            queue: Any = self._pool._result_queue
            queue._wlock.acquire(timeout=5)
            for process in [*self._pool._processes.values()]:
                process.kill()
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


_function: Callable[[Any], Any]  # what this worker applies; set after the fork


def _set_function(function: Callable[[Any], Any]) -> None:
    """Prepare a forked worker."""
    import torch  # seconds, which processes that only `follow_parent` do not need

    global _function
    gc.freeze()  # The parent's objects stay: to free those of CUDA in a child fails.
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    _function = function
    follow_parent()


def _call(task: Any) -> Any:
    return _function(task)


def follow_parent() -> None:
    """End this worker with its parent, even if that is killed; an orphan would wait forever."""

    def wait_for_parent() -> None:
        multiprocessing.parent_process().join()  # pyright: ignore[reportOptionalMemberAccess]
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()
