"""Which samples make up which batch, as pure functions of the seed and the position in the run.

There is no random state: every process computes its own rows, global batches are the same for any
number of processes, and resuming means starting at a position.

In block order, an epoch shuffles the blocks (runs of consecutive records of a shard) and assigns
them to streams; within a stream, samples are shuffled over a window that slides along its blocks.
One process reads a stream: it reads each block once an epoch and holds ``window`` of them. Where
the number of processes does not divide that of the streams, several processes read some streams.
The number of streams depends on the data set and the batch but not on the number of processes
(Streaming's ``num_canonical_nodes``), and so does the order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from common.data.sharing import ALONE, Sharing
from common.resolutions import Resolution, resolution_at

# What random numbers are for. The purpose is the second word of Philox's key, so that a new one
# (at the end of the list) does not change the numbers of the others.
ORDER, AUGMENTATION, ERASING, COLORS, BLOCKS, WINDOW, CLASSES = range(7)
WORDS_PER_BLOCK = 4  # Philox computes four words of 64 bits for each value of its counter
PADDING = -1  # an index that stands for no sample
NO_LABEL = -100  # its label, which cross_entropy ignores
STREAMS = 64  # the greatest number of streams


class Draw(NamedTuple):
    """The rows of a micro-batch that a rank decodes: which samples, and their random numbers."""

    indices: np.ndarray  # int64 [B], PADDING where there is no sample
    uniforms: np.ndarray  # float64 [B, K], in [0, 1)
    # In block order, int64 [B, 3]: the records to read at once with each sample (the first, and the
    # one after the last), and whether this rank draws from them again (0) or not (1).
    spans: np.ndarray | None = None
    image_size: int | None = None  # pixels; None: that of the reader


class Stream(NamedTuple):
    """The samples of a stream in the order of the epoch."""

    samples: np.ndarray  # int64 [N]
    span_of: np.ndarray  # int64 [N], the row of spans that each sample is in
    spans: np.ndarray  # int64 [S, 2], records to read at once: the first, the one after the last


@dataclass
class TrainSampler:
    """Cut each epoch's order of the samples into micro-batches of one data-parallel rank.

    Each rank has consecutive rows of every global batch, and micro-batches are consecutive rows of
    these. The last ``num_samples % total_batch`` samples of an order, which differ by epoch, are
    dropped. With each sample come ``num_uniforms`` numbers in [0, 1) for its augmentation, which
    depend on the seed, the epoch, the step and the row in the global batch alone.

    With ``repeats`` (repeated augmentation, arXiv 1901.09335) each sample is drawn that often in a
    row, and the epoch ends after as many draws as without, as in timm's `RepeatAugSampler`. The
    draws of a sample are ``1 / repeats`` of the rows of its stream apart. Without blocks a stream
    is the whole batch, so that the draws fall on different ranks or micro-batches.

    With ``resolutions``, an epoch has their sizes of images, batches and micro-batches. Neither the
    samples nor the random numbers of a global batch change with images and micro-batches, nor does
    the epoch's order with its batch, except in blocks.

    With ``balanced``, the labels of all samples, int [N], the order is that of `balanced_order`.

    ``block_bounds``, int64, holds the first record of each block and the number of records. With it
    the order is one of streams of blocks, else a permutation of all samples. Each stream has
    consecutive rows of the batch. ``sharing`` tells which rows of a micro-batch are drawn here.
    """

    num_samples: int
    total_batch: int
    micro_batch: int
    _: KW_ONLY
    dp_rank: int = 0
    dp_size: int = 1
    seed: int
    num_uniforms: int = 0
    repeats: int = 1
    balanced: np.ndarray | None = None
    block_bounds: np.ndarray | None = None
    window: int = 1
    resolutions: Sequence[Resolution] = ()
    sharing: Sharing = ALONE

    def batch(self, epoch: int) -> int:
        """Return the samples of a global batch."""
        if self.resolutions:
            return resolution_at(self.resolutions, epoch).total_batch or self.total_batch
        return self.total_batch

    def samples_of(self, epoch: int) -> int:
        """Return the samples of an epoch, over all ranks."""
        batch = self.batch(epoch)
        return self.num_samples // batch * batch

    def __len__(self) -> int:
        """Return the micro-batches on this rank in an epoch of ``total_batch``, ``micro_batch``."""
        steps = self.num_samples // self.total_batch
        return steps * self.total_batch // (self.micro_batch * self.dp_size)

    def rows(self, epoch: int) -> int:
        """Return the samples of a micro-batch, on all ranks that share it."""
        if self.resolutions:
            return resolution_at(self.resolutions, epoch).micro_batch
        return self.micro_batch

    def draws(self, epoch: int, start_sample: int = 0) -> Iterator[Draw]:
        """Yield this rank's rows of the micro-batches of an epoch from ``start_sample`` on.

        ``start_sample`` counts samples over all ranks.
        """
        image_size = None
        if self.resolutions:
            image_size = resolution_at(self.resolutions, epoch).image_size
        order = self._order(epoch)
        rows = self.rows(epoch)
        local = self.sharing.rows(rows)
        # At this rank's last sample of a span the reader may drop the span's records.
        row_of_sample = np.arange(len(order.samples)) % rows
        (is_local,) = np.nonzero(np.isin(row_of_sample, local))
        is_last = np.zeros(len(order.samples), bool)
        is_last[is_local] = _is_last(order.span_of[is_local])
        start = start_sample // self.dp_size
        end = self.samples_of(epoch) // self.dp_size
        for local_sample in range(start, end, rows):
            step, row = self.position(epoch, local_sample)
            uniforms = sample_uniforms(
                self.seed,
                epoch,
                step,
                row + local[0],
                len(local),
                self.num_uniforms,
            )
            drawn = local_sample + np.minimum(local, rows - 1)
            indices = np.where(local < rows, order.samples[drawn], PADDING)
            spans = None
            if self.block_bounds is not None:
                span_of_B = order.span_of[drawn]
                spans = np.c_[order.spans[span_of_B], is_last[drawn]]
            yield Draw(indices, uniforms, spans, image_size)

    def position(self, epoch: int, local_sample: int) -> tuple[int, int]:
        """Return a sample's step in the epoch and its row in the global batch.

        ``local_sample`` counts this rank's samples of the epoch.
        """
        rows_per_rank = self.batch(epoch) // self.dp_size
        step, row = divmod(local_sample, rows_per_rank)
        return step, self.dp_rank * rows_per_rank + row

    def _order(self, epoch: int) -> Stream:
        """Return all samples that this rank draws in an epoch, in order."""
        batch = self.batch(epoch)
        steps = self.num_samples // batch
        count = 1
        if self.block_bounds is not None:
            count = count_streams(len(self.block_bounds) - 1, self.window, batch)
        # Stream i has the rows edges[i] to edges[i + 1] of every global batch.
        edges = np.arange(count + 1) * batch // count
        # Rounded up: the last of a stream's samples may be drawn fewer than ``repeats`` times.
        rows_per_stream = np.diff(edges)
        lengths = -(-steps * rows_per_stream // self.repeats)
        starts = np.cumsum(lengths) - lengths

        samples: list[np.ndarray] = []
        span_of: list[np.ndarray] = []
        spans = [np.empty((0, 2), np.int64)]
        rows_per_rank = batch // self.dp_size
        for number, (begin, end) in enumerate(pairwise(edges)):
            rank_of_row = np.arange(begin, end) // rows_per_rank
            is_mine = rank_of_row == self.dp_rank
            if not is_mine.any():
                continue
            stream = self._stream(epoch, number, starts[number], lengths[number])
            # The draws of a sample lie far apart in a global batch, so that they fall on different
            # ranks: rows 0, 2, 4, 1, 3, 5 of the stream's draws for two repeats and six rows.
            rows = end - begin
            repeat_of_row = np.arange(rows) % self.repeats
            draws = np.argsort(repeat_of_row, kind="stable")[is_mine]
            first_draws = rows * np.arange(steps)[:, None]  # [steps, 1]
            drawn = (first_draws + draws) // self.repeats  # [steps, rows of this rank]
            samples.append(stream.samples[drawn])
            # A stream numbers its spans from 0, the result over all streams of this rank.
            spans_before = sum(map(len, spans))
            span_of.append(stream.span_of[drawn] + spans_before)
            spans.append(stream.spans)
        # [steps, rows of all streams of this rank], row by row
        drawn_samples = np.hstack(samples).ravel()
        spans_of_drawn = np.hstack(span_of).ravel()
        return Stream(drawn_samples, spans_of_drawn, np.concatenate(spans))

    def _stream(self, epoch: int, number: int, start: int, length: int) -> Stream:
        """Return ``length`` samples of stream ``number``, from ``start`` of the order of blocks."""
        if self.block_bounds is None:
            order = epoch_order(self.num_samples, self.seed, epoch)
            if self.balanced is not None:
                order = balanced_order(self.balanced, order, self.seed, epoch)
            one_span = np.array([[0, self.num_samples]])
            return Stream(order, np.zeros_like(order), one_span)
        order = epoch_order(len(self.block_bounds) - 1, self.seed, epoch, BLOCKS)
        words = _philox(self.seed, WINDOW, epoch, number, 0).random_raw(length)
        spans = cut_stream(self.block_bounds, order, start, length)
        return shuffle_stream(spans, self.window, words)


@dataclass
class EvalSampler:
    """Give each rank consecutive samples, every sample exactly once, in equally many batches.

    `PADDING` fills the last ones. ``block_bounds`` and ``sharing`` are as for `TrainSampler`.
    """

    num_samples: int
    batch: int
    _: KW_ONLY
    dp_rank: int = 0
    dp_size: int = 1
    block_bounds: np.ndarray | None = None
    sharing: Sharing = ALONE

    def samples_of(self, epoch: int) -> int:
        """Return the samples of a pass, over all ranks, with padding."""
        return len(self) * self.batch * self.dp_size

    def __len__(self) -> int:
        """Return the number of batches per pass on each rank."""
        return -(-self.num_samples // (self.batch * self.dp_size))

    def rows(self, epoch: int) -> int:
        """Return the samples of a batch, on all ranks that share it."""
        return self.batch

    def draws(self, epoch: int, start_sample: int = 0) -> Iterator[Draw]:
        """Yield this rank's rows of the batches from ``start_sample`` on, the same in every epoch.

        ``start_sample`` counts samples over all ranks.
        """
        samples_per_rank = len(self) * self.batch
        offset = self.dp_rank * samples_per_rank
        # The data set may end within this rank's samples, or before them.
        first = min(offset, self.num_samples)
        end = min(offset + samples_per_rank, self.num_samples)
        local = self.sharing.rows(self.batch)
        no_uniforms = np.empty((len(local), 0))
        start = start_sample // (self.batch * self.dp_size)
        for number in range(start, len(self)):
            indices = offset + number * self.batch + local
            is_sample = (local < self.batch) & (indices < self.num_samples)
            spans = None
            if self.block_bounds is not None:
                if self.sharing.size > 1 and is_sample.any():
                    # Other ranks have the samples before the next batch.
                    first, *_, end = [*indices[is_sample], indices[is_sample][-1] + 1]
                # Padding is no record: it gets the last one's span.
                record = np.minimum(indices, self.num_samples - 1)
                block = np.searchsorted(self.block_bounds, record, side="right")
                # Two ranks may meet in a block: each reads its own part.
                starts = np.maximum(self.block_bounds[block - 1], first)
                ends = np.minimum(self.block_bounds[block], end)
                spans = np.c_[starts, ends, indices == ends - 1]
            yield Draw(np.where(is_sample, indices, PADDING), no_uniforms, spans)


def epoch_order(num_samples: int, seed: int, epoch: int, purpose: int = ORDER) -> np.ndarray:
    """Return the epoch's permutation of ``range(num_samples)``, int64.

    It sorts raw words: numpy guarantees their stream across versions, but not
    ``Generator.permutation``.
    """
    words = _philox(seed, purpose, epoch, 0, 0).random_raw(num_samples)
    return np.argsort(words, kind="stable")


def balanced_order(labels: np.ndarray, order: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return as many samples as ``order`` has, int64, such that each class has equally many.

    Of K classes with samples, each is drawn once in every K draws, in random order. Its samples
    come in their ``order``, and from the first again where they are fewer than its draws.
    """
    # [N], the samples of one class after those of another; each class in the epoch's order
    positions = np.argsort(labels[order], kind="stable")
    by_class = order[positions]
    _, counts = np.unique(labels, return_counts=True)  # [K]
    firsts = np.cumsum(counts) - counts
    # Rounded up to whole rounds of K draws; what is too many is cut off at the end.
    classes = len(counts)
    rounds = -(-len(order) // classes)
    draws = np.arange(rounds * classes)
    number, label = np.divmod(draws, classes)
    words = _philox(seed, CLASSES, epoch, 0, 0).random_raw(len(draws))
    # ``number`` stays sorted: the classes are shuffled within it
    label = label[np.lexsort((words, number))]
    drawn = firsts[label] + number % counts[label]
    return by_class[drawn][: len(order)]


def sample_uniforms(
    seed: int,
    epoch: int,
    step: int,
    row: int,
    rows: int,
    count: int,
    purpose: int = AUGMENTATION,
) -> np.ndarray:
    """Return random numbers in [0, 1), float64 [rows, count], ``count`` for each sample.

    The samples are those from ``row`` of the global batch on. ``purpose`` is `AUGMENTATION`,
    `ERASING` or `COLORS`. Each sample owns whole blocks of Philox's counter, so that any row is
    computed without those before it.
    """
    counter_blocks = -(-count // WORDS_PER_BLOCK)  # blocks of the counter for one sample
    philox = _philox(seed, purpose, epoch, step, row * counter_blocks)
    words = philox.random_raw(rows * counter_blocks * WORDS_PER_BLOCK)
    # The upper 53 bits of a word: as many as a float64 holds.
    integers = words >> np.uint64(11)
    return integers.reshape(rows, -1)[:, :count] * 2.0**-53


def _philox(seed: int, purpose: int, epoch: int, step: int, block: int) -> np.random.Philox:
    """Return the generator of the random numbers for ``purpose`` at a position in the run."""
    key = np.array([seed, purpose], np.uint64)
    counter = np.array([block, step, epoch, 0], np.uint64)
    return np.random.Philox(key=key, counter=counter)


def _is_last(values: np.ndarray) -> np.ndarray:
    """Return for each value whether no equal one follows."""
    # [values + 1], the position of the last of each value
    last = np.zeros(values.max(initial=-1) + 1, np.int64)
    positions = np.arange(len(values))
    last[values] = positions  # NumPy assigns in order: equal values keep the last
    return last[values] == positions


def count_streams(num_blocks: int, window: int, total_batch: int) -> int:
    """Return the number of streams, a power of two of at most `STREAMS`.

    Each has at least a row of the batch and a window of blocks.
    """
    most = max(1, min(STREAMS, total_batch, num_blocks // window))
    return 1 << (most.bit_length() - 1)


def window_bytes(block: float, window: int, processes: int) -> float:
    """Return the most bytes that a process holds of blocks of at most ``block`` bytes.

    A process that shares a stream with others holds more.
    """
    streams = -(-STREAMS // processes)
    return streams * window * block


def cut_stream(bounds: np.ndarray, order: np.ndarray, start: int, count: int) -> np.ndarray:
    """Return the spans, int64 [S, 2], of ``count`` samples of the blocks in ``order``.

    ``start`` is the first one's number in that order. Block ``i`` has the samples from
    ``bounds[i]`` to ``bounds[i + 1]``. The first and the last span may be parts of blocks.
    """
    # [blocks], the number of samples up to the end of each block in ``order``
    lengths = np.diff(bounds)[order]
    ends = np.cumsum(lengths)
    first, last = np.searchsorted(ends, [start, start + count - 1], side="right")
    chosen = order[first : last + 1]
    spans = np.stack([bounds[chosen], bounds[chosen + 1]], 1)
    # The neighbouring streams have the rest of the last and of the first block.
    spans[-1, 1] -= ends[last] - (start + count)
    start_of_first = ends[first - 1] if first else 0
    spans[0, 0] += start - start_of_first
    return spans


def shuffle_stream(spans: np.ndarray, window: int, words: np.ndarray) -> Stream:
    """Shuffle samples so that at most ``window`` of ``spans`` are begun and not ended at a time.

    ``words`` are random: uint64, one for each sample. Each span scatters its samples evenly over an
    interval of time; at any time the intervals of ``window`` spans overlap. A single window
    shuffles all samples.
    """
    # [S] samples of each span and its number; [N] the span of each sample, and the sample
    lengths = np.diff(spans)[:, 0]
    number = np.arange(len(spans))
    span_of = np.repeat(number, lengths)
    first_of_span = np.cumsum(lengths) - lengths
    shift_of_span = spans[:, 0] - first_of_span
    samples = np.arange(len(span_of)) + shift_of_span[span_of]

    # The interval of span i is [i - window + 1, i + 1), cut off at both ends of the stream. A
    # sample's time in it is a fixed-point number: 32 bits before the point, 32 random ones after.
    begin = np.maximum(number - window + 1, 0)
    end = np.minimum(number + 1, max(1, len(spans) - window + 1))
    begin_of = begin.astype(np.uint64)[span_of]
    width_of = (end - begin).astype(np.uint64)[span_of]
    fraction = words >> np.uint64(32)
    time = (begin_of << np.uint64(32)) + width_of * fraction
    order = np.argsort(time, kind="stable")
    return Stream(samples[order], span_of[order], spans)
