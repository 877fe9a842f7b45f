"""Launch one of many ranks in a single process, on fake tensors, for estimates."""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake", whose collectives do nothing
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.parallel import DistributedDataParallel

from common.colossal.context import RepairedContext, launch, shutdown
from common.colossal.engine import Engine
from common.colossal.tensor_parallel import layers


def allow_fake_launches() -> None:
    """Permanently patch functions that read tensor values or query hardware, for `fake_launch`."""
    new_group = dist.new_group

    def new_fake_group(ranks: list[int], *_: Any, **__: Any) -> Any:
        return new_group(ranks, backend="fake") if 0 in ranks else dist.GroupMember.NON_GROUP_MEMBER

    torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0
    dist.new_group = new_fake_group
    RepairedContext.detect_num_processes_on_current_node = lambda context: None  # gathers host names
    layers._random_stream = lambda device, number: nullcontext()  # reads a random state
    Tensor.item = lambda tensor: 0.0  # read by the loss scaler for overflows
    # FSDP cuts every parameter into as many tensors as there are ranks, of which rank 0 keeps the first
    _fsdp_param._chunk_with_empty = lambda tensor, parts, dim: [tensor.narrow(dim, 0, -(-tensor.size(dim) // parts))]
    nn.Module.to = _convert_in_place  # swaps tensors, which fake tensors do not support
    warnings.simplefilter("ignore")  # the run itself will warn


@contextmanager
def fake_launch(config: Mapping[str, Any], world_size: int) -> Iterator[None]:
    """Launch as rank 0 of ``world_size`` on the CPU; collectives return at once and do nothing.

    For tensors of `torch._subclasses.FakeTensorMode`, after `allow_fake_launches`.
    """
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        launch(config, 0, world_size, "", 0, backend="fake", verbose=False)
    try:
        yield
    finally:
        shutdown()


def _convert_in_place(model: nn.Module, target: Any) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(target)
    return model


def reduce_without_waiting(engine: Engine) -> None:
    """Register a DDP communication hook: DDP's own code reads the fake collective's future, which is empty."""
    if isinstance(engine.model, DistributedDataParallel):
        engine.model.register_comm_hook(engine.model.process_group, _reduce_bucket)


def _reduce_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer().div_(group.size())
    dist.all_reduce(buffer, group=group)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future
