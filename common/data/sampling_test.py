import numpy as np
import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler

from common.data.sampling import PADDING, EvalSampler, TrainSampler, epoch_order, sample_uniforms
from common.errors import UserError


def global_batches(
    samples: int, global_batch: int, micro_batch: int, dp_size: int, epoch: int = 0, repeats: int = 1
) -> list[tuple]:
    """Reassemble all ranks' micro-batches: (indices, uniforms) of each step, in order of rows."""
    options = dict(dp_size=dp_size, seed=7, uniforms=5, repeats=repeats)
    ranks = [TrainSampler(samples, global_batch, micro_batch, dp_rank=rank, **options) for rank in range(dp_size)]
    parts = [draw for draws in zip(*(rank.draws(epoch) for rank in ranks), strict=True) for draw in draws]
    assert len(parts) == len(ranks[0]) * dp_size
    steps = zip(*[iter(parts)] * (ranks[0].accumulation * dp_size), strict=True)
    return [tuple(np.concatenate(field) for field in zip(*step, strict=True)) for step in steps]


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize(("micro_batch", "dp_size"), [(4, 1), (4, 2), (1, 4), (2, 2), (8, 1), (2, 4)])
def test_global_batches_do_not_depend_on_processes_or_accumulation(micro_batch, dp_size, repeats):
    one = global_batches(30, 8, 8, 1, repeats=repeats)
    for got, expected in zip(global_batches(30, 8, micro_batch, dp_size, repeats=repeats), one, strict=True):
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_array_equal(got[1], expected[1])


def test_an_epoch_holds_each_sample_at_most_once_and_drops_only_the_rest():
    dropped = []
    for epoch in range(3):
        indices = np.concatenate([batch for batch, _ in global_batches(30, 8, 2, 2, epoch)])
        assert len(indices) == 24
        assert len(np.unique(indices)) == 24
        dropped.append(set(range(30)) - set(indices.tolist()))
    assert dropped[0] != dropped[1] != dropped[2]


@pytest.mark.parametrize(("samples", "batch", "dp_size"), [(1100, 256, 4), (700, 128, 8), (1000, 192, 3)])
def test_repeated_augmentation_is_timms(samples, batch, dp_size, monkeypatch):
    """The same draws in each step from the same permutation; a sample's are in different micro-batches."""
    order = torch.from_numpy(epoch_order(samples, 7, 2))
    monkeypatch.setattr(torch, "randperm", lambda count, generator: order)
    samplers = [RepeatAugSampler(range(samples), dp_size, rank, selected_round=batch) for rank in range(dp_size)]
    theirs = np.array([list(sampler) for sampler in samplers]).T.reshape(-1, batch)
    ours = global_batches(samples, batch, batch // dp_size, dp_size, epoch=2, repeats=3)
    assert len(ours) == len(theirs)
    for (indices, uniforms), expected in zip(ours, theirs, strict=True):
        assert sorted(indices) == sorted(expected)
        assert len(np.unique(indices)) in (-(-batch // 3), -(-batch // 3) + 1)
        assert len(np.unique(uniforms, axis=0)) == batch
        for micro_batch in indices.reshape(3 if dp_size == 3 else 4, -1):
            assert len(np.unique(micro_batch)) == len(micro_batch)


def test_order_is_a_permutation_of_seed_and_epoch():
    order = epoch_order(1000, seed=0, epoch=0)
    np.testing.assert_array_equal(np.sort(order), np.arange(1000))
    np.testing.assert_array_equal(order, epoch_order(1000, seed=0, epoch=0))
    for other in (epoch_order(1000, seed=0, epoch=1), epoch_order(1000, seed=1, epoch=0)):
        assert abs(np.corrcoef(order, other)[0, 1]) < 0.1
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1


def test_the_draws_of_a_seed_stay_the_same_for_ever():
    assert epoch_order(8, seed=42, epoch=3).tolist() == [5, 3, 4, 7, 6, 1, 0, 2]
    np.testing.assert_array_equal(
        sample_uniforms(42, 3, 1, 2, 1, 3), [[0.44243122935824586, 0.205813289885728, 0.01969606774345667]]
    )


def test_uniforms_are_uniform_and_independent():
    uniforms = sample_uniforms(seed=0, epoch=0, step=0, row=0, rows=20000, count=7)
    assert uniforms.shape == (20000, 7)
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    np.testing.assert_allclose(np.quantile(uniforms, [0.1, 0.5, 0.9], axis=0).T, [[0.1, 0.5, 0.9]] * 7, atol=0.015)
    next_step = sample_uniforms(seed=0, epoch=0, step=1, row=0, rows=20000, count=7)
    correlation = np.corrcoef(np.concatenate([uniforms[:-1].T, uniforms[1:].T, next_step[1:].T]))
    assert np.abs(correlation - np.eye(21)).max() < 0.04


def test_an_epoch_resumes_from_any_micro_batch():
    sampler = TrainSampler(40, 8, 2, dp_rank=1, dp_size=2, seed=1, uniforms=2)
    whole = list(sampler.draws(epoch=4))
    for start in (0, 1, 5, len(sampler)):
        rest = list(sampler.draws(4, start))
        assert len(rest) == len(sampler) - start
        for got, expected in zip(rest, whole[start:], strict=True):
            np.testing.assert_array_equal(got.indices, expected.indices)
            np.testing.assert_array_equal(got.uniforms, expected.uniforms)


def test_fewer_samples_than_a_batch_are_refused():
    with pytest.raises(UserError, match="TOTAL_BATCH_SIZE=32 is more than the 31 training samples"):
        TrainSampler(31, 32, 32)


@pytest.mark.parametrize(("samples", "batch", "dp_size"), [(33, 8, 4), (3, 2, 4), (16, 4, 2), (17, 4, 1), (1, 1, 3)])
def test_evaluation_counts_every_sample_once_in_equally_many_batches(samples, batch, dp_size):
    ranks = [EvalSampler(samples, batch, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    draws = [list(rank.draws(epoch=5)) for rank in ranks]
    assert {len(drawn) for drawn in draws} == {len(ranks[0])}
    indices = np.concatenate([draw.indices for drawn in draws for draw in drawn])
    assert {len(draw.indices) for drawn in draws for draw in drawn} == {batch}
    assert sorted(indices[indices != PADDING].tolist()) == list(range(samples))
