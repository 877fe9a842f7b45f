"""Order of an epoch that reads blocks, consecutive records of a shard: streams of blocks, shuffled in windows.

The blocks are permuted and dealt out to streams; within a stream, samples are shuffled over a window that slides along
its blocks. A stream belongs to one process, so only one reads a block, once an epoch, and holds `window` blocks of each
of its streams. The number of streams depends on the data set and the batch but not on the processes (Streaming's
``num_canonical_nodes``), and so does the order.
"""

from typing import NamedTuple

import numpy as np

STREAMS = 64


class Stream(NamedTuple):
    """The samples of a stream in the order of the epoch, and the records that are read at once with each."""

    samples: np.ndarray  # int64 [N]
    span_of: np.ndarray  # int64 [N], a row of `spans`
    spans: np.ndarray  # int64 [S, 2]: first record, and the one after the last


def count_streams(blocks: int, window: int, global_batch: int) -> int:
    """Return the number of streams: a power of two, so that each has a row of the batch and a window of blocks."""
    most = max(1, min(STREAMS, global_batch, blocks // window))
    return 1 << (most.bit_length() - 1)


def window_bytes(block: float, window: int, processes: int) -> float:
    """Return the most bytes that a process holds of its streams; a block has at most ``block`` bytes."""
    return -(-STREAMS // processes) * window * block


def cut_stream(bounds: np.ndarray, order: np.ndarray, start: int, count: int) -> np.ndarray:
    """Return the spans of samples ``start`` to ``start + count`` of the blocks in ``order``; the outer ones are cut.

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
    """Shuffle the samples of ``spans`` so that at any time at most ``window`` spans have been begun and not ended.

    ``words`` are random: uint64, one for each sample. Each span scatters its samples evenly over an interval of time;
    at any time the intervals of ``window`` spans overlap. A single window shuffles all samples.
    """
    lengths, number = np.diff(spans)[:, 0], np.arange(len(spans))
    span_of = np.repeat(number, lengths)
    samples = np.arange(len(span_of)) + (spans[:, 0] - np.cumsum(lengths) + lengths)[span_of]
    begin = np.maximum(number - window + 1, 0)
    end = np.minimum(number + 1, max(1, len(spans) - window + 1))
    begin, width = (array.astype(np.uint64)[span_of] for array in (begin, end - begin))
    order = np.argsort((begin << np.uint64(32)) + width * (words >> np.uint64(32)), kind="stable")
    return Stream(samples[order], span_of[order], spans)
