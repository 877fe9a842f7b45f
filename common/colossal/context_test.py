"""Process groups and random state."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossalai.accelerator import api
from colossalai.legacy.context.parallel_context import ParallelContext
from colossalai.legacy.context.random import seed
from colossalai.legacy.global_variables import tensor_parallel_env

from common.colossal import ParallelMode, gpc, launch, shutdown
from common.colossal.context import RepairedContext
from common.testing.ranks import launched, run_ranks


@pytest.mark.parametrize(
    ("context", "address"),
    [(RepairedContext, None), (ParallelContext, "tcp://[127.0.0.1]:29500")],  # no address but IPv6 is valid in brackets
)
def test_upstreams_rendezvous_address(context: type, address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    met = []

    def init_process_group(*args: object, init_method: str | None = None, **kwargs: object) -> None:
        met.append(init_method)
        raise InterruptedError

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr("common.colossal.context.open_store", lambda *_: dist.HashStore())
    with pytest.raises(InterruptedError):
        context.init_global_dist(gpc, 0, 2, "gloo", "127.0.0.1", 29500)
    assert met == [address]


def groups(config: dict) -> tuple:
    with launched(**config):
        modes = (ParallelMode.DATA, ParallelMode.TENSOR)
        return tensor_parallel_env.save(), *(gpc.get_ranks_in_group(mode) for mode in modes)


def groups_of_two_launches() -> list[tuple]:
    """Launch with ``parallel``, then as a single process without: upstream would keep the tensor-parallel size."""
    tensor_parallel_env.vocab_parallel = True  # as building a classifier of many classes does
    together = groups({"parallel": {"tensor": {"mode": "1d", "size": 2}}})
    del os.environ["RANK"]
    return [together, groups({})]


def test_groups_and_relaunch() -> None:
    (rank0, single0), (rank1, single1) = run_ranks(2, groups_of_two_launches)
    assert (rank0[0]["mode"], *rank0[1:]) == ("1d", [0], [0, 1])
    assert (rank1[0]["mode"], *rank1[1:]) == ("1d", [1], [0, 1])
    fresh = type(tensor_parallel_env)().save()
    assert single0 == single1 == (fresh, [0], [0])


def test_the_device_is_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_ACCELERATOR", "stale")
    with launched():
        assert api.get_accelerator().name == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_process_can_be_launched_again() -> None:
    for number in (1, 2):
        with launched(NUMBER=number):
            assert gpc.config.get("NUMBER") == number
    shutdown()  # nothing left to do
    assert gpc.config is None


def test_seeds() -> None:
    launch({}, 0, 1, "", 0, backend="gloo", seed=7, verbose=False)
    try:
        data = torch.rand(3)
        with seed(ParallelMode.TENSOR):
            tensor = torch.rand(3)
        after = torch.rand(3)
        torch.manual_seed(7)
        assert torch.equal(torch.rand(6), torch.cat([data, after]))  # the tensor-parallel stream leaves no trace
        torch.manual_seed(7 + gpc.get_local_rank(ParallelMode.TENSOR))
        assert torch.equal(torch.rand(3), tensor)
    finally:
        shutdown()


def random_draws(config: dict) -> list[torch.Tensor]:
    with launched(**config):
        weights = torch.rand(4)
        gpc.separate_data_parallel_seeds()
        mask = F.dropout(torch.ones(64), 0.5)
        with seed(ParallelMode.TENSOR):
            tensor_mask = F.dropout(torch.ones(64), 0.5)
        return [weights, mask, tensor_mask]


def test_data_parallel_ranks_share_weights_but_not_masks() -> None:
    (weights0, mask0, _), (weights1, mask1, _) = run_ranks(2, random_draws, {})
    assert torch.equal(weights0, weights1)
    assert not torch.equal(mask0, mask1)


def test_tensor_parallel_ranks_share_masks_but_not_those_of_their_shards() -> None:
    parallel = {"parallel": {"tensor": {"mode": "1d", "size": 2}}}
    (weights0, mask0, shard0), (weights1, mask1, shard1) = run_ranks(2, random_draws, parallel)
    assert torch.equal(weights0, weights1)
    assert torch.equal(mask0, mask1)
    assert not torch.equal(shard0, shard1)
