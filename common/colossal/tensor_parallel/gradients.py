"""Gradients of shards: sums over the ranks with other samples, and norms over all shards.

Shape suffixes: R rows of squared norms, P parameters.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.colossal.tensor_parallel.sharding import named_shards, sharing_group
from common.colossal.upstream import gpc


def sum_partial_gradients(parameters: Iterable[Tensor]) -> None:
    """Sum in place the gradients of shards replicated over different samples, with one all-reduce per group."""
    grads_by_group = defaultdict(list)
    for parameter in parameters:
        if _is_piece(parameter) and parameter.grad is not None and parameter.shard.summed_over is not None:
            grads_by_group[parameter.shard.summed_over].append(parameter.grad)
    for group, grads in grads_by_group.items():
        if gpc.get_world_size(group) == 1:
            continue
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=gpc.get_group(group))
        sums = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [total.view_as(grad) for total, grad in zip(sums, grads, strict=True)])


def global_grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of the whole model's gradient, a 0-dim tensor; one all-reduce if sharded.

    Upstream clips by the norm of each rank's shards (legacy/engine/_base_engine.py:161), so replicas diverge.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(map(_is_piece, trained)):
        return _norm([parameter.grad for parameter in trained])
    grads_by_copies = defaultdict(list)
    for parameter in trained:
        grads_by_copies[_copies(parameter)].append(parameter.grad)
    square = sum(_norm(grads).square() / copies for copies, grads in grads_by_copies.items())
    dist.all_reduce(square, group=gpc.get_group(sharing_group(trained)))
    return square.sqrt()


def _norm(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norm of all tensors together, in float32: float16 ends at 65,504."""
    return torch.stack(torch._foreach_norm(tensors, 2, torch.float32)).norm()


def build_norm_reducer(model: nn.Module) -> Callable[[Tensor, list[Tensor]], Tensor] | None:
    """Return a function from squared norms of shards [R, P], and their P parameters, to those of whole tensors [R, P].

    It uses one all-reduce. None if the model is not sharded.
    """
    return _reduce_norms if any(map(_is_piece, named_shards(model).values())) else None


def _reduce_norms(squares_RP: Tensor, parameters: list[Tensor]) -> Tensor:
    shares_P = torch.tensor([1 / _copies(parameter) for parameter in parameters], dtype=squares_RP.dtype)
    squares_RP = squares_RP * shares_P.to(squares_RP.device, non_blocking=True)
    dist.all_reduce(squares_RP, group=gpc.get_group(sharing_group(parameters)))
    return squares_RP


def _is_piece(parameter: Tensor) -> bool:
    return hasattr(parameter, "shard")


def _copies(parameter: Tensor) -> int:
    """Return how many ranks of the tensor-parallel group hold this shard."""
    copies = parameter.shard.copies
    return 1 if copies is None else gpc.get_world_size(copies)
