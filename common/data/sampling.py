"""Which samples make up which batch, as pure functions of the seed and the position in the run.

There is no random state: every process computes its own rows, global batches are the same for any number of processes,
and resuming means starting at a position.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from common.errors import UserError

# the second word of Philox's key keeps the kinds of draws apart
ORDER, AUGMENTATION, ERASING, COLORS = 0, 1, 2, 3
WORDS_PER_BLOCK = 4
# an index that stands for no sample, and its label: cross_entropy ignores that one
PADDING, NO_LABEL = -1, -100


class Draw(NamedTuple):
    """One batch of a rank: ``indices`` int64 [B], `PADDING` where there is no sample; ``uniforms`` float64 [B, K]."""

    indices: np.ndarray
    uniforms: np.ndarray


class TrainSampler:
    """Deal out each epoch's permutation of the samples as micro-batches of one data-parallel rank.

    Micro-batch ``m`` of a step is rows ``(m * dp_size + dp_rank) * micro_batch`` onwards of that step's global batch.
    The last ``samples % global_batch`` samples of a permutation, which differ by epoch, are dropped. With each sample
    come ``uniforms`` numbers in [0, 1) for its augmentation, which depend on the seed, the epoch, the step and the row
    in the global batch alone.

    With ``repeats`` (repeated augmentation, arXiv 1901.09335) each sample is dealt that often in a row, and the epoch
    ends after as many draws as without, as in timm's `RepeatAugSampler`. The draws of a sample are ``1 / repeats`` of
    the global batch apart, so that other ranks or micro-batches get them.
    """

    def __init__(
        self,
        samples: int,
        global_batch: int,
        micro_batch: int,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        uniforms: int = 0,
        repeats: int = 1,
    ) -> None:
        if samples < global_batch:
            raise UserError(f"TOTAL_BATCH_SIZE={global_batch} is more than the {samples} training samples: lower it")
        self.samples, self.global_batch, self.micro_batch = samples, global_batch, micro_batch
        self.dp_rank, self.dp_size, self.seed, self.uniforms = dp_rank, dp_size, seed, uniforms
        self.repeats = repeats
        assert global_batch % self.stride == 0, "the plan of the run divides the batch"
        self.accumulation = global_batch // self.stride

    @property
    def stride(self) -> int:
        """Samples that one micro-batch takes over all ranks."""
        return self.micro_batch * self.dp_size

    def __len__(self) -> int:
        """Return the micro-batches in an epoch."""
        return self.samples // self.global_batch * self.accumulation

    def draws(self, epoch: int, start: int = 0) -> Iterator[Draw]:
        """Yield the epoch's micro-batches from number ``start`` on."""
        order = epoch_order(self.samples, self.seed, epoch)
        places = np.argsort(np.arange(self.global_batch) % self.repeats, kind="stable")
        for number in range(start, len(self)):
            step, row = self.place(number)
            drawn = step * self.global_batch + places[row : row + self.micro_batch]
            yield Draw(
                order[drawn // self.repeats],
                sample_uniforms(self.seed, epoch, step, row, self.micro_batch, self.uniforms),
            )

    def place(self, number: int) -> tuple[int, int]:
        """Return the step of an epoch's micro-batch ``number``, and the row of its first sample in the global batch."""
        step, micro_step = divmod(number, self.accumulation)
        return step, (micro_step * self.dp_size + self.dp_rank) * self.micro_batch


class EvalSampler:
    """Deal out every sample exactly once over the ranks, as many batches to each; `PADDING` fills the last ones."""

    def __init__(self, samples: int, batch: int, *, dp_rank: int = 0, dp_size: int = 1) -> None:
        self.samples, self.batch, self.dp_rank, self.dp_size = samples, batch, dp_rank, dp_size

    @property
    def stride(self) -> int:
        """Samples that one batch takes over all ranks."""
        return self.batch * self.dp_size

    def __len__(self) -> int:
        """Return the batches of each rank."""
        return -(-self.samples // self.stride)

    def draws(self, epoch: int, start: int = 0) -> Iterator[Draw]:
        """Yield the batches from number ``start`` on, the same in every epoch."""
        del epoch
        for number in range(start, len(self)):
            indices = (number * self.dp_size + self.dp_rank) * self.batch + np.arange(self.batch)
            yield Draw(np.where(indices < self.samples, indices, PADDING), np.empty((self.batch, 0)))


def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the epoch's permutation of ``range(samples)``, int64.

    It sorts raw words: numpy guarantees their stream across versions, but not ``Generator.permutation``.
    """
    return np.argsort(_philox(seed, ORDER, epoch, 0, 0).random_raw(samples), kind="stable")


def sample_uniforms(
    seed: int, epoch: int, step: int, row: int, rows: int, count: int, kind: int = AUGMENTATION
) -> np.ndarray:
    """Return ``count`` numbers in [0, 1) for each of ``rows`` samples from ``row`` of the global batch on, float64.

    ``kind`` is `AUGMENTATION`, `ERASING` or `COLORS`. Each sample owns whole blocks of Philox's counter, so that any
    row is computed without those before it.
    """
    blocks = -(-count // WORDS_PER_BLOCK)
    words = _philox(seed, kind, epoch, step, row * blocks).random_raw(rows * blocks * WORDS_PER_BLOCK)
    # a float64 holds 53 bits
    return (words >> np.uint64(11)).reshape(rows, -1)[:, :count] * 2.0**-53


def _philox(seed: int, kind: int, epoch: int, step: int, block: int) -> np.random.Philox:
    counter = np.array([block, step, epoch, 0], np.uint64)
    return np.random.Philox(key=np.array([seed % 2**64, kind], np.uint64), counter=counter)
