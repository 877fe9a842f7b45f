from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler

from common.data.sampler import (
    PADDING,
    Draw,
    EvalSampler,
    TrainSampler,
    epoch_order,
    window_bytes,
)
from common.data.sharing import Sharing
from common.resolutions import Resolution

BLOCKS = np.append(np.arange(0, 1000, 7), 1000)  # the last is shorter
SPLIT = dict(block_bounds=BLOCKS, window=3)
# how often each label occurs: of 5 classes, one is without samples
SAMPLES_OF_LABEL = {
    3: 700,
    0: 200,
    4: 90,
    1: 10,
}
LABELS = np.repeat(list(SAMPLES_OF_LABEL), list(SAMPLES_OF_LABEL.values()))
OTHER = dict(resolutions=[Resolution(9, 8, 2, 1)])  # micro-batches of 2


def build(
    samples: int, total_batch: int, micro_batch: int, dp_size: int, **options: object
) -> list[TrainSampler]:
    """Return the samplers of all ranks."""
    arguments = dict(dp_size=dp_size, seed=7, num_uniforms=5, **options)
    return [
        TrainSampler(samples, total_batch, micro_batch, dp_rank=rank, **arguments)
        for rank in range(dp_size)
    ]


def indices_of(draws: Iterable[Draw]) -> np.ndarray:
    return np.concatenate([draw.indices for draw in draws])


def uniforms_of(draws: Iterable[Draw]) -> np.ndarray:
    return np.concatenate([draw.uniforms for draw in draws])


def uneven_blocks() -> np.ndarray:
    """Return the bounds of 1024 blocks of 5 to 15 samples."""
    sizes = 5 + np.arange(1024) * 7 % 11
    return np.cumsum([0, *sizes])


def global_batches(*sizes: int, epoch: int = 0, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """Reassemble the micro-batches of all ranks: indices [steps, B] and uniforms [steps, B, 5]."""
    samples, total_batch, *_ = sizes
    steps = samples // total_batch
    indices = []
    uniforms = []
    for rank in build(*sizes, **options):
        draws = list(rank.draws(epoch))
        rows = indices_of(draws)
        numbers = uniforms_of(draws)
        indices.append(rows.reshape(steps, -1))
        uniforms.append(numbers.reshape(steps, -1, 5))
    return np.hstack(indices), np.hstack(uniforms)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repeats": 3},
        SPLIT,
        {"balanced": LABELS},
    ],
)
@pytest.mark.parametrize("dp_size", [1, 2, 8])
def test_an_epoch_of_another_batch_is_that_of_a_run_with_it(dp_size, options):
    resolutions = [
        Resolution(1, 8, 6, 1, 48),
        Resolution(2, 8, 3, 2, 24),
        Resolution(9, 8, 6, 2, 96),
    ]
    ranks = build(1000, 96, 12, dp_size, resolutions=resolutions, **options)
    for epoch, batch in enumerate((48, 24, 96)):
        indices, uniforms = global_batches(1000, batch, batch, 1, epoch=epoch, **options)
        local_batch = batch // dp_size
        for rank, sampler in enumerate(ranks):
            first = rank * local_batch
            local = slice(first, first + local_batch)
            assert sampler.samples_of(epoch) == indices.size
            for done in (0, 5):  # steps of the epoch
                draws = list(sampler.draws(epoch, done * batch))
                found_indices = indices_of(draws)
                found_uniforms = uniforms_of(draws).ravel()
                expected_indices = indices[done:, local].ravel()
                expected_uniforms = uniforms[done:, local].ravel()
                assert np.array_equal(found_indices, expected_indices)
                assert np.array_equal(found_uniforms, expected_uniforms)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repeats": 3},
        SPLIT,
        SPLIT | {"repeats": 3},
        OTHER,
        {"balanced": LABELS},
    ],
)
@pytest.mark.parametrize(
    ("micro_batch", "dp_size"),
    [
        (8, 1),
        (8, 2),
        (4, 4),
        (2, 8),
        (12, 2),
        (8, 3),
        (1, 24),
    ],
)
def test_global_batches_do_not_depend_on_processes_or_accumulation(micro_batch, dp_size, options):
    one = global_batches(1000, 48, 48, 1, epoch=1, **options)
    several = global_batches(1000, 48, micro_batch, dp_size, epoch=1, **options)
    for expected, found in zip(one, several, strict=True):
        assert np.array_equal(found, expected)
    if "repeats" not in options and "balanced" not in options:
        indices, _ = one
        assert len(np.unique(indices)) == 20 * 48


@pytest.mark.parametrize(("samples", "batch", "dp_size"), [(700, 128, 8), (1000, 192, 3)])
def test_repeated_augmentation_is_timms(samples, batch, dp_size, monkeypatch):
    """In each step; the draws of a sample are in different micro-batches."""
    order = torch.from_numpy(epoch_order(samples, 7, 2))
    monkeypatch.setattr(torch, "randperm", lambda count, generator: order)
    theirs_by_rank = []
    for rank in range(dp_size):
        sampler = RepeatAugSampler(range(samples), dp_size, rank, selected_round=batch)
        theirs_by_rank.append(list(sampler))
    theirs = np.array(theirs_by_rank).T.reshape(-1, batch)
    local_batch = batch // dp_size
    ours = global_batches(samples, batch, local_batch, dp_size, epoch=2, repeats=3)
    micro_batches = 3 if dp_size == 3 else 4
    for indices, uniforms, expected in zip(*ours, theirs, strict=True):
        assert sorted(indices) == sorted(expected)
        different_rows = np.unique(uniforms, axis=0)
        assert len(different_rows) == batch
        for micro_batch in indices.reshape(micro_batches, -1):
            different_samples = np.unique(micro_batch)
            assert len(different_samples) == len(micro_batch)


def test_classes_are_drawn_equally_often():
    """One of each class in every four draws, and all samples of a class in turn."""
    indices, _ = global_batches(1000, 1000, 1000, 1, balanced=LABELS)
    (batch,) = indices
    labels = LABELS[batch].reshape(-1, 4)
    assert (np.sort(labels) == [0, 1, 3, 4]).all()
    orders = np.unique(labels, axis=0)
    assert len(orders) == 24  # all
    times_drawn = np.bincount(batch, minlength=1000)
    # 250 draws of each class
    expected = {
        3: {0, 1},
        0: {1, 2},
        4: {2, 3},
        1: {25},
    }
    for label, times in expected.items():
        of_label = label == LABELS
        assert set(times_drawn[of_label]) == times


def only_draw(sampler: TrainSampler) -> list[int]:
    """Return the samples of epoch 3, which is one micro-batch."""
    (draw,) = sampler.draws(3)
    return draw.indices.tolist()


def test_the_draws_of_a_seed_stay_the_same_for_ever():
    order = epoch_order(8, seed=42, epoch=3)
    assert order.tolist() == [5, 3, 4, 7, 6, 1, 0, 2]

    sampler = TrainSampler(24, 12, 2, seed=42, num_uniforms=3)
    draws = list(sampler.draws(3))
    row = draws[7].uniforms[0]  # row 2 of step 1
    assert row.tolist() == [
        0.44243122935824586,
        0.205813289885728,
        0.01969606774345667,
    ]

    labels = np.array([0, 0, 0, 0, 0, 1])
    balanced = TrainSampler(6, 6, 6, seed=42, balanced=labels)
    assert only_draw(balanced) == [5, 3, 5, 4, 5, 1]

    blocks = np.array([0, 3, 6, 9, 12])
    of_blocks = TrainSampler(12, 12, 12, seed=42, block_bounds=blocks, window=2)
    assert only_draw(of_blocks) == [11, 10, 5, 3, 9, 4, 0, 7, 8, 1, 2, 6]


@pytest.mark.parametrize("dp_size", [1, 8, 64])
def test_a_process_holds_as_many_blocks_as_its_window(dp_size):
    blocks = uneven_blocks()
    most = 4 * 64 // dp_size
    assert window_bytes(1, 4, dp_size) == most
    for rank in build(blocks[-1], 64, 1, dp_size, block_bounds=blocks, window=4):
        held = set()
        for draw in rank.draws(epoch=2):
            (span,) = draw.spans.tolist()
            first, _, is_last = span
            held.add(first)
            assert len(held) <= most
            if is_last:
                held.remove(first)


def reads_of(draws: Iterable[Draw]) -> list[tuple[int, int]]:
    """Return the parts of blocks that are read, [first, end), each time one begins to be held."""
    reads = []
    held = set()
    for draw in draws:
        for first, end, is_last in draw.spans.tolist():
            if first not in held:
                reads.append((first, end))
            held.add(first)
            if is_last:
                held.remove(first)
    return reads


def reads_of_ranks(ranks: list[TrainSampler], epoch: int) -> list[tuple[int, int]]:
    reads = []
    for rank in ranks:
        reads += reads_of(rank.draws(epoch))
    return reads


@pytest.mark.parametrize(
    ("dp_size", "repeats"),
    [
        (1, 1),
        (2, 1),
        (8, 1),
        (64, 1),
        (2, 2),
    ],
)
def test_a_block_is_read_once_an_epoch_by_one_process(dp_size, repeats):
    """Of 64 streams of about 16 blocks, two that meet share a block, each with its own part."""
    blocks = uneven_blocks()
    samples = int(blocks[-1])
    micro_batch = min(8, 64 // dp_size)
    options = dict(block_bounds=blocks, window=4, repeats=repeats)
    ranks = build(samples, 64, micro_batch, dp_size, **options)
    reads = reads_of_ranks(ranks, epoch=2)
    reads.sort()
    for (_, end), (first, _) in pairwise(reads):
        assert end <= first
    steps = samples // 64
    drawn = steps * 64 // repeats
    read = sum(end - first for first, end in reads)
    longest_block = 15
    assert drawn <= read
    assert read <= drawn + 64 * longest_block


@pytest.mark.parametrize(
    ("dp_size", "times"),
    [
        (64, 1),
        (3, 2),
        (6, 2),
        (128, 2),
    ],
)
def test_numbers_of_processes_that_do_not_divide_64_read_some_blocks_twice(dp_size, times):
    blocks = np.arange(0, 10_001, 10)
    ranks = build(10_000, 384, 1, dp_size, block_bounds=blocks)
    reads = reads_of_ranks(ranks, epoch=0)
    counts = Counter(reads)
    assert max(counts.values()) == times


def test_a_resumed_epoch_reads_no_more_than_the_rest():
    blocks = uneven_blocks()
    samples = int(blocks[-1])
    half = samples // 128 * 64
    for rank in build(samples, 64, 8, 8, block_bounds=blocks, window=4):
        all_reads = reads_of(rank.draws(2))
        rest = reads_of(rank.draws(2, half))
        in_use = 8 * 4  # 8 streams with 4 blocks each
        assert len(rest) <= len(all_reads) / 2 + in_use
        assert set(rest) < set(all_reads)


def test_blocks_are_mixed_and_differ_by_epoch_and_seed():
    blocks = np.arange(0, 12_801, 100)

    def blocks_drawn(seed: int, epoch: int) -> np.ndarray:
        """Return the block of each sample, [steps, B]."""
        sampler = TrainSampler(12_800, 128, 128, seed=seed, block_bounds=blocks, window=4)
        batches = [draw.indices for draw in sampler.draws(epoch)]
        return np.stack(batches) // 100

    orders = [
        blocks_drawn(seed=0, epoch=0),
        blocks_drawn(seed=0, epoch=1),
        blocks_drawn(seed=1, epoch=0),
    ]
    # 32 streams with 4 of the 128 blocks at a time
    blocks_of_batches = [len(np.unique(batch)) for batch in orders[0]]
    assert np.mean(blocks_of_batches) > 60
    # that a draw is of the same block is a chance of 1 in 128, in one order of blocks 1 in 4
    for one, other in combinations(orders, 2):
        same = one == other
        assert same.mean() < 0.02


@pytest.mark.parametrize(
    ("samples", "batch", "dp_size"),
    [
        (33, 8, 4),
        (3, 2, 4),
        (16, 4, 2),
        (17, 4, 1),
        (1, 1, 3),
    ],
)
def test_evaluation_counts_every_sample_once_in_equally_many_batches(samples, batch, dp_size):
    blocks = np.append(np.arange(0, samples, 5), samples)
    build_rank = partial(EvalSampler, samples, batch, dp_size=dp_size, block_bounds=blocks)
    ranks = [build_rank(dp_rank=rank) for rank in range(dp_size)]
    draws = []
    for rank in ranks:
        draws += rank.draws(epoch=5)
    indices = indices_of(draws)
    batches_of_rank = len(ranks[0])
    assert len(indices) == dp_size * batch * batches_of_rank
    is_sample = indices != PADDING
    drawn = indices[is_sample]
    assert drawn.tolist() == list(range(samples))
    spans = np.concatenate([draw.spans for draw in draws])
    first, end, is_last = spans[is_sample].T
    assert (first <= drawn).all()
    assert (drawn < end).all()
    # each span is read once
    ends_span = drawn == end - 1
    assert (is_last == ends_span).all()
    lengths = end - first
    assert lengths[ends_span].sum() == samples


@pytest.mark.parametrize("blocks", [None, np.arange(0, 91, 5)])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_that_share_the_decoding_draw_its_rows(size, blocks):
    """Each row is one rank's, and each span is dropped at the last of the rank's rows in it."""
    of_train = dict(seed=1, num_uniforms=2, block_bounds=blocks, window=2)
    builders = [
        partial(TrainSampler, 90, 36, 6, **of_train),
        partial(EvalSampler, 90, 7, block_bounds=blocks),
    ]
    for build_one in builders:
        unshared = build_one()
        expected = list(unshared.draws(0))
        by_rank = []
        for rank in range(size):
            sharing = Sharing(rank, size)
            sampler = build_one(sharing=sharing)
            by_rank.append(list(sampler.draws(0)))
        for parts, draw in zip(zip(*by_rank, strict=True), expected, strict=True):
            assert_parts_make_up(parts, draw)
        if blocks is not None:
            for draws in by_rank:
                assert_spans_are_dropped(draws)


def assert_parts_make_up(parts: tuple[Draw, ...], draw: Draw) -> None:
    """Check that the equally long parts of the ranks are the rows of the draw, then padding."""
    lengths = {len(part.indices) for part in parts}
    assert len(lengths) == 1
    rows = len(draw.indices)
    indices = indices_of(parts)
    uniforms = uniforms_of(parts)
    assert indices[:rows].tolist() == draw.indices.tolist()
    assert (indices[rows:] == PADDING).all()
    assert np.array_equal(uniforms[:rows], draw.uniforms)


def assert_spans_are_dropped(draws: list[Draw]) -> None:
    """Check that each sample is in its span, and that none is held in the end."""
    held = set()
    for draw in draws:
        # padding is last, and needs no span
        samples = draw.indices[draw.indices != PADDING]
        for index, span in zip(samples, draw.spans, strict=False):
            first, end, is_last = span
            assert first <= index < end
            held.add(first)
            if is_last:
                held.remove(first)
    assert not held
