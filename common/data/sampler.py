"""Which samples make up which batch, as pure functions of the seed and the position in the run.

There is no random state: every process computes its own rows, global batches are the same for any
number of processes, and resuming means starting at a position.

An epoch that reads blocks, consecutive records of a shard, permutes them and deals them out to
streams; within a stream samples are shuffled over a window that slides along its blocks. A stream
belongs to one process, which alone reads its blocks, once an epoch, and holds ``window`` of them;
where the number of processes does not divide that of the streams, some streams belong to several.
The number of streams depends on the data set and the batch but not on the processes (Streaming's
``num_canonical_nodes``), and so does the order.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

# the second word of Philox's key keeps the kinds of draws apart
ORDER, AUGMENTATION, ERASING, COLORS, BLOCKS, WINDOW = range(6)
WORDS_PER_BLOCK = 4
# an index that stands for no sample, and its label: cross_entropy ignores that one
PADDING, NO_LABEL = -1, -100
STREAMS = 64  # of blocks, at most


class Draw(NamedTuple):
    """One batch of a rank: ``indices`` int64 [B], `PADDING` where there is no sample; ``uniforms``
    float64 [B, K].

    Where records are read in blocks, ``spans``, int64 [B, 3], says for each sample which records to
    read at once (the first, the one after the last), and whether this rank draws from them again
    (0) or not (1).
    """

    indices: np.ndarray
    uniforms: np.ndarray
    spans: np.ndarray | None = None


class Stream(NamedTuple):
    """The samples of a stream in the order of the epoch, and the records that are read at once with
    each.
    """

    samples: np.ndarray  # int64 [N]
    span_of: np.ndarray  # int64 [N], a row of `spans`
    spans: np.ndarray  # int64 [S, 2]: first record, and the one after the last


@dataclass
class TrainSampler:
    """Deal out each epoch's order of the samples as micro-batches of one data-parallel rank.

    Each rank has consecutive rows of every global batch, and micro-batches are consecutive rows of
    these. The last ``samples % total_batch`` samples of an order, which differ by epoch, are
    dropped. With each sample come ``uniforms`` numbers in [0, 1) for its augmentation, which depend
    on the seed, the epoch, the step and the row in the global batch alone.

    With ``repeats`` (repeated augmentation, arXiv 1901.09335) each sample is dealt that often in a
    row, and the epoch ends after as many draws as without, as in timm's `RepeatAugSampler`. The
    draws of a sample are ``1 / repeats`` of the rows of its stream apart; without blocks this is
    the whole batch, and other ranks or micro-batches get them.

    The order is a permutation of all samples, or with ``blocks``, the first record of each block
    and the number of records, one of streams of blocks: each stream has consecutive rows of the
    batch.
    """

    samples: int
    total_batch: int
    micro_batch: int
    _: KW_ONLY
    dp_rank: int = 0
    dp_size: int = 1
    seed: int
    uniforms: int = 0
    repeats: int = 1
    blocks: np.ndarray | None = None
    window: int = 1

    def __post_init__(self) -> None:
        self.stride = (
            self.micro_batch * self.dp_size
        )  # samples that one micro-batch takes over all ranks
        self.accumulation = self.total_batch // self.stride

    def __len__(self) -> int:
        """Return the micro-batches in an epoch."""
        return self.samples // self.total_batch * self.accumulation

    def draws(self, epoch: int, start: int = 0) -> Iterator[Draw]:
        """Yield the epoch's micro-batches from number ``start`` on."""
        order = self._order(epoch)
        is_last = _is_last(order.span_of)
        for number in range(start, len(self)):
            step, row = self.place(number)
            drawn = slice(number * self.micro_batch, (number + 1) * self.micro_batch)
            uniforms = sample_uniforms(self.seed, epoch, step, row, self.micro_batch, self.uniforms)
            spans = (
                None
                if self.blocks is None
                else np.c_[order.spans[order.span_of[drawn]], is_last[drawn]]
            )
            yield Draw(order.samples[drawn], uniforms, spans)

    def place(self, number: int) -> tuple[int, int]:
        """Return the step of an epoch's micro-batch ``number``, and the row of its first sample in
        the global batch.
        """
        step, micro_step = divmod(number, self.accumulation)
        return step, (self.dp_rank * self.accumulation + micro_step) * self.micro_batch

    def _order(self, epoch: int) -> Stream:
        """Return all that this rank draws in an epoch, in order."""
        steps, rows = self.samples // self.total_batch, self.total_batch // self.dp_size
        count = (
            1
            if self.blocks is None
            else count_streams(len(self.blocks) - 1, self.window, self.total_batch)
        )
        edges = np.arange(count + 1) * self.total_batch // count  # rows of each stream
        lengths = -(-steps * np.diff(edges) // self.repeats)
        starts = np.cumsum(lengths) - lengths
        samples, span_of, spans = [], [], [np.empty((0, 2), np.int64)]
        for number, (begin, end) in enumerate(pairwise(edges)):
            mine = np.arange(begin, end) // rows == self.dp_rank
            if not mine.any():
                continue
            stream = self._stream(epoch, number, starts[number], lengths[number])
            # repeats of a sample lie far apart in a global batch, so that they fall on different
            # ranks
            places = np.argsort(np.arange(end - begin) % self.repeats, kind="stable")[mine]
            drawn = (np.arange(steps)[:, None] * (end - begin) + places) // self.repeats
            samples.append(stream.samples[drawn])
            span_of.append(stream.span_of[drawn] + sum(map(len, spans)))
            spans.append(stream.spans)
        return Stream(np.hstack(samples).ravel(), np.hstack(span_of).ravel(), np.concatenate(spans))

    def _stream(self, epoch: int, number: int, start: int, length: int) -> Stream:
        if self.blocks is None:
            order = epoch_order(self.samples, self.seed, epoch)
            return Stream(order, np.zeros_like(order), np.array([[0, self.samples]]))
        order = epoch_order(len(self.blocks) - 1, self.seed, epoch, BLOCKS)
        words = _philox(self.seed, WINDOW, epoch, number, 0).random_raw(length)
        return shuffle_stream(cut_stream(self.blocks, order, start, length), self.window, words)


@dataclass
class EvalSampler:
    """Deal out consecutive samples to each rank, every sample exactly once, as many batches to
    each.

    `PADDING` fills the last ones. ``blocks`` is as for `TrainSampler`.
    """

    samples: int
    batch: int
    _: KW_ONLY
    dp_rank: int = 0
    dp_size: int = 1
    blocks: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.stride = self.batch * self.dp_size

    def __len__(self) -> int:
        """Return the batches of each rank."""
        return -(-self.samples // self.stride)

    def draws(self, epoch: int, start: int = 0) -> Iterator[Draw]:
        """Yield the batches from number ``start`` on, the same in every epoch."""
        share = len(self) * self.batch
        first, end = (min(rank * share, self.samples) for rank in (self.dp_rank, self.dp_rank + 1))
        for number in range(start, len(self)):
            indices = self.dp_rank * share + number * self.batch + np.arange(self.batch)
            spans = None
            if self.blocks is not None:
                block = np.searchsorted(
                    self.blocks, np.minimum(indices, self.samples - 1), side="right"
                )
                ends = np.minimum(self.blocks[block], end)
                spans = np.c_[np.maximum(self.blocks[block - 1], first), ends, indices == ends - 1]
            yield Draw(
                np.where(indices < self.samples, indices, PADDING), np.empty((self.batch, 0)), spans
            )


def epoch_order(samples: int, seed: int, epoch: int, kind: int = ORDER) -> np.ndarray:
    """Return the epoch's permutation of ``range(samples)``, int64.

    It sorts raw words: numpy guarantees their stream across versions, but not
    ``Generator.permutation``.
    """
    return np.argsort(_philox(seed, kind, epoch, 0, 0).random_raw(samples), kind="stable")


def sample_uniforms(
    seed: int, epoch: int, step: int, row: int, rows: int, count: int, kind: int = AUGMENTATION
) -> np.ndarray:
    """Return ``count`` numbers in [0, 1) for each of ``rows`` samples from ``row`` of the global
    batch on, float64.

    ``kind`` is `AUGMENTATION`, `ERASING` or `COLORS`. Each sample owns whole blocks of Philox's
    counter, so that any row is computed without those before it.
    """
    blocks = -(-count // WORDS_PER_BLOCK)
    words = _philox(seed, kind, epoch, step, row * blocks).random_raw(
        rows * blocks * WORDS_PER_BLOCK
    )
    # a float64 holds 53 bits
    return (words >> np.uint64(11)).reshape(rows, -1)[:, :count] * 2.0**-53


def _philox(seed: int, kind: int, epoch: int, step: int, block: int) -> np.random.Philox:
    counter = np.array([block, step, epoch, 0], np.uint64)
    return np.random.Philox(key=np.array([seed % 2**64, kind], np.uint64), counter=counter)


def _is_last(values: np.ndarray) -> np.ndarray:
    """Return for each value whether no equal one follows."""
    last = np.zeros(values.max(initial=-1) + 1, np.int64)
    last[values] = np.arange(len(values))  # of equal indices, the last is assigned
    return last[values] == np.arange(len(values))


def count_streams(blocks: int, window: int, total_batch: int) -> int:
    """Return the number of streams: a power of two, so that each has a row of the batch and a
    window of blocks.
    """
    most = max(1, min(STREAMS, total_batch, blocks // window))
    return 1 << (most.bit_length() - 1)


def window_bytes(block: float, window: int, processes: int) -> float:
    """Return the most bytes of blocks, each of at most ``block``, that a process holds, if it
    shares no stream.
    """
    return -(-STREAMS // processes) * window * block


def cut_stream(bounds: np.ndarray, order: np.ndarray, start: int, count: int) -> np.ndarray:
    """Return the spans of samples ``start`` to ``start + count`` of the blocks in ``order``; the
    outer ones are cut.

    Block ``i`` has the samples from ``bounds[i]`` to ``bounds[i + 1]``.
    """
    ends = np.cumsum(np.diff(bounds)[order])
    first, last = np.searchsorted(ends, [start, start + count - 1], side="right")
    chosen = order[first : last + 1]
    spans = np.stack([bounds[chosen], bounds[chosen + 1]], 1)
    spans[-1, 1] -= ends[last] - (start + count)
    spans[0, 0] += start - (ends[first - 1] if first else 0)
    return spans


def shuffle_stream(spans: np.ndarray, window: int, words: np.ndarray) -> Stream:
    """Shuffle the samples of ``spans`` so that at any time at most ``window`` spans have been begun
    and not ended.

    ``words`` are random: uint64, one for each sample. Each span scatters its samples evenly over an
    interval of time; at any time the intervals of ``window`` spans overlap. A single window
    shuffles all samples.
    """
    lengths, number = np.diff(spans)[:, 0], np.arange(len(spans))
    span_of = np.repeat(number, lengths)
    samples = np.arange(len(span_of)) + (spans[:, 0] - np.cumsum(lengths) + lengths)[span_of]
    begin = np.maximum(number - window + 1, 0)
    end = np.minimum(number + 1, max(1, len(spans) - window + 1))
    begin, width = (array.astype(np.uint64)[span_of] for array in (begin, end - begin))
    order = np.argsort((begin << np.uint64(32)) + width * (words >> np.uint64(32)), kind="stable")
    return Stream(samples[order], span_of[order], spans)
