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
LABELS = np.repeat([3, 0, 4, 1], [700, 200, 90, 10])  # of 5 classes, one without samples
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


def global_batches(*sizes: int, epoch: int = 0, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """Reassemble the micro-batches of all ranks: indices [steps, B] and uniforms [steps, B, 5]."""
    steps = sizes[0] // sizes[1]
    indices = []
    uniforms = []
    for rank in build(*sizes, **options):
        draws = list(rank.draws(epoch))
        indices.append(np.concatenate([draw.indices for draw in draws]).reshape(steps, -1))
        uniforms.append(np.concatenate([draw.uniforms for draw in draws]).reshape(steps, -1, 5))
    return np.hstack(indices), np.hstack(uniforms)


@pytest.mark.parametrize("options", [{}, {"repeats": 3}, SPLIT, {"balanced": LABELS}])
@pytest.mark.parametrize("dp_size", [1, 2, 8])
def test_an_epoch_of_another_batch_is_that_of_a_run_with_it(dp_size, options):
    sizes = [Resolution(1, 8, 6, 1, 48), Resolution(2, 8, 3, 2, 24), Resolution(9, 8, 6, 2, 96)]
    ranks = build(1000, 96, 12, dp_size, resolutions=sizes, **options)
    for epoch, batch in enumerate((48, 24, 96)):
        indices, uniforms = global_batches(1000, batch, batch, 1, epoch=epoch, **options)
        for rank, sampler in enumerate(ranks):
            own = slice(rank * batch // dp_size, (rank + 1) * batch // dp_size)
            assert sampler.samples_of(epoch) == indices.size
            for done in (0, 5):  # steps of the epoch
                draws = list(sampler.draws(epoch, done * batch))
                drawn = np.concatenate([draw.indices for draw in draws])
                assert np.array_equal(drawn, indices[done:, own].ravel())
                numbers = np.concatenate([draw.uniforms for draw in draws])
                assert np.array_equal(numbers.ravel(), uniforms[done:, own].ravel())


@pytest.mark.parametrize(
    "options", [{}, {"repeats": 3}, SPLIT, SPLIT | {"repeats": 3}, OTHER, {"balanced": LABELS}]
)
@pytest.mark.parametrize(
    ("micro_batch", "dp_size"), [(8, 1), (8, 2), (4, 4), (2, 8), (12, 2), (8, 3), (1, 24)]
)
def test_global_batches_do_not_depend_on_processes_or_accumulation(micro_batch, dp_size, options):
    one = global_batches(1000, 48, 48, 1, epoch=1, **options)
    several = global_batches(1000, 48, micro_batch, dp_size, epoch=1, **options)
    assert all(map(np.array_equal, several, one))
    assert len(np.unique(one[0])) == 20 * 48 or options.keys() & {"repeats", "balanced"}


@pytest.mark.parametrize(("samples", "batch", "dp_size"), [(700, 128, 8), (1000, 192, 3)])
def test_repeated_augmentation_is_timms(samples, batch, dp_size, monkeypatch):
    """In each step; the draws of a sample are in different micro-batches."""
    order = torch.from_numpy(epoch_order(samples, 7, 2))
    monkeypatch.setattr(torch, "randperm", lambda count, generator: order)
    samplers = [
        RepeatAugSampler(range(samples), dp_size, rank, selected_round=batch)
        for rank in range(dp_size)
    ]
    theirs = np.array([list(sampler) for sampler in samplers]).T.reshape(-1, batch)
    ours = global_batches(samples, batch, batch // dp_size, dp_size, epoch=2, repeats=3)
    for indices, uniforms, expected in zip(*ours, theirs, strict=True):
        assert sorted(indices) == sorted(expected)
        assert len(np.unique(uniforms, axis=0)) == batch
        for micro_batch in indices.reshape(3 if dp_size == 3 else 4, -1):
            assert len(np.unique(micro_batch)) == len(micro_batch)


def test_classes_are_drawn_equally_often():
    """One of each class in every four draws, and all samples of a class in turn."""
    ((batch,), _) = global_batches(1000, 1000, 1000, 1, balanced=LABELS)
    labels = LABELS[batch].reshape(-1, 4)
    assert (np.sort(labels) == [0, 1, 3, 4]).all()
    assert len(np.unique(labels, axis=0)) == 24  # in all orders
    for label, times in {3: {0, 1}, 0: {1, 2}, 4: {2, 3}, 1: {25}}.items():
        assert {*np.bincount(batch, minlength=1000)[label == LABELS]} == times


def test_the_draws_of_a_seed_stay_the_same_for_ever():
    assert epoch_order(8, seed=42, epoch=3).tolist() == [5, 3, 4, 7, 6, 1, 0, 2]
    draws = list(TrainSampler(24, 12, 2, seed=42, num_uniforms=3).draws(3))
    row = draws[7].uniforms[0]  # row 2 of step 1
    assert row.tolist() == [0.44243122935824586, 0.205813289885728, 0.01969606774345667]
    (draw,) = TrainSampler(6, 6, 6, seed=42, balanced=np.array([0, 0, 0, 0, 0, 1])).draws(3)
    assert draw.indices.tolist() == [5, 3, 5, 4, 5, 1]
    blocks = np.array([0, 3, 6, 9, 12])
    (draw,) = TrainSampler(12, 12, 12, seed=42, block_bounds=blocks, window=2).draws(3)
    assert draw.indices.tolist() == [11, 10, 5, 3, 9, 4, 0, 7, 8, 1, 2, 6]


@pytest.mark.parametrize("dp_size", [1, 8, 64])
def test_a_process_holds_as_many_blocks_as_its_window(dp_size):
    blocks = np.cumsum([0, *(5 + np.arange(1024) * 7 % 11)])
    for rank in build(blocks[-1], 64, 1, dp_size, block_bounds=blocks, window=4):
        held = set()
        for draw in rank.draws(epoch=2):
            ((first, _, is_last),) = draw.spans.tolist()
            held.add(first)
            assert len(held) <= window_bytes(1, 4, dp_size) == 4 * 64 // dp_size
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


@pytest.mark.parametrize(("dp_size", "repeats"), [(1, 1), (2, 1), (8, 1), (64, 1), (2, 2)])
def test_a_block_is_read_once_an_epoch_by_one_process(dp_size, repeats):
    """Of 64 streams of about 16 blocks, two that meet share a block, each with its own part."""
    blocks = np.cumsum([0, *(5 + np.arange(1024) * 7 % 11)])
    samples = int(blocks[-1])
    micro_batch = min(8, 64 // dp_size)
    ranks = build(samples, 64, micro_batch, dp_size, block_bounds=blocks, window=4, repeats=repeats)
    reads = sorted(read for rank in ranks for read in reads_of(rank.draws(epoch=2)))
    assert all(end <= first for (_, end), (first, _) in pairwise(reads))
    drawn = samples // 64 * 64 // repeats
    assert drawn <= sum(end - first for first, end in reads) <= drawn + 64 * 15


@pytest.mark.parametrize(("dp_size", "times"), [(64, 1), (3, 2), (6, 2), (128, 2)])
def test_numbers_of_processes_that_do_not_divide_64_read_some_blocks_twice(dp_size, times):
    ranks = build(10_000, 384, 1, dp_size, block_bounds=np.arange(0, 10_001, 10))
    counts = Counter(read for rank in ranks for read in reads_of(rank.draws(0)))
    assert max(counts.values()) == times


def test_a_resumed_epoch_reads_no_more_than_the_rest():
    blocks = np.cumsum([0, *(5 + np.arange(1024) * 7 % 11)])
    samples = int(blocks[-1])
    for rank in build(samples, 64, 8, 8, block_bounds=blocks, window=4):
        whole = reads_of(rank.draws(2))
        rest = reads_of(rank.draws(2, samples // 128 * 64))
        # the second half, and the blocks that are in use: 8 streams with 4 each
        assert len(rest) <= len(whole) / 2 + 4 * 8
        assert {*rest} < {*whole}


def test_blocks_are_mixed_and_differ_by_epoch_and_seed():
    blocks = np.arange(0, 12_801, 100)
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        sampler = TrainSampler(12_800, 128, 128, seed=seed, block_bounds=blocks, window=4)
        orders.append(np.stack([draw.indices // 100 for draw in sampler.draws(epoch)]))
    # 32 streams with 4 of the 128 blocks at a time
    assert np.mean([len(np.unique(batch)) for batch in orders[0]]) > 60
    # that a draw is of the same block is a chance of 1 in 128, in one order of blocks 1 in 4
    assert max((one == other).mean() for one, other in combinations(orders, 2)) < 0.02


@pytest.mark.parametrize(
    ("samples", "batch", "dp_size"), [(33, 8, 4), (3, 2, 4), (16, 4, 2), (17, 4, 1), (1, 1, 3)]
)
def test_evaluation_counts_every_sample_once_in_equally_many_batches(samples, batch, dp_size):
    blocks = np.append(np.arange(0, samples, 5), samples)
    arguments = dict(dp_size=dp_size, block_bounds=blocks)
    ranks = [EvalSampler(samples, batch, dp_rank=rank, **arguments) for rank in range(dp_size)]
    draws = [draw for rank in ranks for draw in rank.draws(epoch=5)]
    indices = np.concatenate([draw.indices for draw in draws])
    assert len(indices) == dp_size * batch * len(ranks[0])
    is_sample = indices != PADDING
    assert indices[is_sample].tolist() == list(range(samples))
    first, end, is_last = np.concatenate([draw.spans for draw in draws])[is_sample].T
    assert ((first <= indices[is_sample]) & (indices[is_sample] < end)).all()
    # each span is read once
    assert (is_last == (indices[is_sample] == end - 1)).all()
    assert (end - first)[is_last == 1].sum() == samples


@pytest.mark.parametrize("blocks", [None, np.arange(0, 91, 5)])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_that_share_the_decoding_draw_its_rows(size, blocks):
    """Each row is one rank's, and each span is dropped at the last of the rank's rows in it."""
    train = partial(TrainSampler, 90, 36, 6, seed=1, num_uniforms=2, block_bounds=blocks, window=2)
    for build_one in (train, partial(EvalSampler, 90, 7, block_bounds=blocks)):
        expected = [*build_one().draws(0)]
        shares = [build_one(sharing=Sharing(rank, size)) for rank in range(size)]
        drawn = [[*sampler.draws(0)] for sampler in shares]
        for number, draw in enumerate(expected):
            parts = [draws[number] for draws in drawn]
            assert len({len(part.indices) for part in parts}) == 1
            rows = len(draw.indices)
            indices = np.concatenate([part.indices for part in parts])
            assert indices[:rows].tolist() == draw.indices.tolist()
            assert (indices[rows:] == PADDING).all()
            uniforms = np.concatenate([part.uniforms for part in parts])
            assert np.array_equal(uniforms[:rows], draw.uniforms)
        for draws in drawn if blocks is not None else ():
            held = set()
            for draw in draws:
                # padding is last, and needs no span
                for index, (first, end, is_last) in zip(
                    draw.indices[draw.indices != PADDING], draw.spans, strict=False
                ):
                    assert first <= index < end
                    held.add(first)
                    held -= {first} if is_last else set()
            assert not held
