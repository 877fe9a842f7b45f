"""Launches of one process of many, whose collectives do nothing, to estimate its step."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist

# The import registers the backend "fake".
import torch.testing._internal.distributed.fake_pg
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.parallel import DistributedDataParallel

from common.engine.engine import FixedBuckets
from common.engine.groups import RepairedContext, join_groups, shutdown
from common.engine.tensor_parallel import layers
from common.files import Values


def allow_fake_launches() -> None:
    """Permanently patch functions that read tensor values or query hardware, for `fake_launch`."""
    new_group = dist.new_group

    def new_fake_group(ranks: list[int], *_: Any, **__: Any) -> Any:
        return new_group(ranks, backend="fake") if 0 in ranks else dist.GroupMember.NON_GROUP_MEMBER

    def first_chunk(tensor: Tensor, parts: int, dim: int) -> list[Tensor]:
        return [tensor.narrow(dim, 0, -(-tensor.size(dim) // parts))]

    patches: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: False),
        (torch.cuda, "device_count", lambda: 0),
        (dist, "new_group", new_fake_group),
        # Upstream gathers host names.
        (RepairedContext, "detect_num_processes_on_current_node", lambda context: None),
        # Reads a random state.
        (layers, "random_stream", lambda device, number: nullcontext()),
        # The loss scaler reads it for overflows.
        (Tensor, "item", lambda tensor: 0.0),
        # Reads values too. With one bucket the same bytes are sent.
        (FixedBuckets, "build_buckets", lambda ddp: None),
        # FSDP cuts every parameter into as many tensors as there are ranks; rank 0 keeps the first
        (_fsdp_param, "_chunk_with_empty", first_chunk),
        # Swaps tensors, which fake tensors do not support.
        (nn.Module, "to", _convert_in_place),
    ]
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    warnings.simplefilter("ignore")  # the run itself will warn


@contextmanager
def fake_launch(config: Values, world_size: int) -> Iterator[None]:
    """Launch as rank 0 of ``world_size`` on the CPU; collectives return at once and do nothing.

    For tensors of `torch._subclasses.FakeTensorMode`, after `allow_fake_launches`.
    """
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        join_groups(config, 0, world_size, "", 0, backend="fake", verbose=False)
    try:
        yield
    finally:
        shutdown()


def _convert_in_place(model: nn.Module, target: Any) -> nn.Module:
    """Stand in for `nn.Module.to`."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(target)
    return model


def reduce_without_waiting(engine: Any) -> None:
    """Register a DDP hook, as DDP's own code waits for the fake collective's empty future."""
    if isinstance(engine.model, DistributedDataParallel):
        engine.model.register_comm_hook(engine.model.process_group, _reduce_bucket)


def _reduce_bucket(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=group)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future
