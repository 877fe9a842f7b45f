"""Read the records of draws in threads, ahead of their use, one by one or in blocks."""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np

from common.data.sampler import PADDING, Draw
from common.errors import UserError

# more threads than cores, because they wait for the disk; in large parts, because from memory they are bound by the GIL
READING_THREADS = 16
RECORDS_PER_READ = 64  # of those that are read one by one
DRAWS_AHEAD, BYTES_AHEAD, MOST_DRAWS_AHEAD = 3, 128_000_000, 64

Record = tuple[bytes | memoryview, int] | UserError  # an encoded image and its label, or why there is none


class RecordSource(Protocol):
    """What is read: the records of a split, by number."""

    def read_span(self, first: int, end: int) -> Sequence[Record]: ...

    def span_bytes(self, first: int, end: int) -> int: ...


class _Pending(NamedTuple):
    draw: Draw
    places: list[tuple[Future[Sequence[Record]], int]]  # of each sample, in the records of a read
    nbytes: int  # whose reading has begun with this draw


class RecordReader:
    """Yield draws with their records, while the next draws are read; a span stays in memory until its last use.

    At least `DRAWS_AHEAD` draws are ahead, and more of them up to `BYTES_AHEAD` and `MOST_DRAWS_AHEAD`. Bad records
    are yielded as errors; a failure of the storage is raised.
    """

    def __init__(self, source: RecordSource) -> None:
        self.source = source
        self._pool = ThreadPoolExecutor(READING_THREADS, thread_name_prefix="record-reader")

    def read(self, draws: Iterator[Draw]) -> Generator[tuple[Draw, list[Record]], None, None]:
        """Yield each draw and the records of its samples, without padding, in order."""
        held: dict[int, Future[Sequence[Record]]] = {}  # spans, by their first record
        pending: deque[_Pending] = deque()
        try:
            for draw in draws:
                pending.append(self._begin(draw, held))
                nbytes = sum(each.nbytes for each in pending)
                if len(pending) > DRAWS_AHEAD and (nbytes > BYTES_AHEAD or len(pending) > MOST_DRAWS_AHEAD):
                    yield _finish(pending.popleft())
            while pending:
                yield _finish(pending.popleft())
        finally:
            for future in {future for each in pending for future, _ in each.places}:
                future.cancel()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, draw: Draw, held: dict[int, Future[Sequence[Record]]]) -> _Pending:
        indices, places, nbytes = draw.indices[draw.indices != PADDING], [], 0
        if draw.spans is None:
            for part in np.split(indices, range(RECORDS_PER_READ, len(indices), RECORDS_PER_READ)):
                future = self._pool.submit(self._read_each, part.tolist())
                nbytes += sum(self.source.span_bytes(index, index + 1) for index in part.tolist())
                places += [(future, number) for number in range(len(part))]
            return _Pending(draw, places, nbytes)
        for index, (first, end, is_last) in zip(indices.tolist(), draw.spans.tolist(), strict=False):  # padding is last
            if first not in held:
                held[first] = self._pool.submit(self.source.read_span, first, end)
                nbytes += self.source.span_bytes(first, end)
            places.append((held[first], index - first))
            if is_last:
                del held[first]
        return _Pending(draw, places, nbytes)

    def _read_each(self, indices: Sequence[int]) -> list[Record]:
        return [record for index in indices for record in self.source.read_span(index, index + 1)]


def _finish(pending: _Pending) -> tuple[Draw, list[Record]]:
    return pending.draw, [future.result()[number] for future, number in pending.places]
