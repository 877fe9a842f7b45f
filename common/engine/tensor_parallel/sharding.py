"""Shard a model by tensor parallelism; gather full tensors, from ZeRO's shards too; sum gradients.

A sharded parameter has an attribute ``sharding``; others are the same on all ranks.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain, repeat
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from common.engine.linear_pairs import FIRST_LAYERS, SECOND_LAYERS
from common.engine.tensor_parallel.layers import (
    ColumnLinear,
    Linear2D,
    Linear2p5D,
    Linear3D,
    RankSeeded,
    RowLinear,
    ShardedNorm,
)
from common.engine.tensor_parallel.layout import LAYOUTS, TENSOR, Layout, Sharding, name_shardings
from common.engine.upstream import (
    ParallelLayer,
    ParallelMode,
    gather_forward_split_backward,
    gpc,
    tensor_parallel_env,
)
from common.errors import UserError

# The classes of the first and the second layer of a pair.
SHARDED_PAIRS = {
    "1d": (ColumnLinear, RowLinear),
    "2d": (Linear2D, Linear2D),
    "2.5d": (Linear2p5D, Linear2p5D),
    "3d": (Linear3D, partial(Linear3D, second=True)),
}


def shard_tensor_parallel(model: nn.Module) -> nn.Module:
    """Shard a Vision Transformer in place in the launch's tensor-parallel mode, if there is one.

    Call it after the launch and before building the optimizer, with equal weights on all ranks of a
    tensor-parallel group. The model still maps full images [B, C, Y, X], the same on all ranks of
    the group, to full logits [B, num_classes]. Dropout masks are equal on ranks with the same
    activations, drop_path masks on ranks with the same samples.
    """
    mode = tensor_parallel_env.mode
    if mode is None:
        return model
    if any(isinstance(layer, ParallelLayer) for layer in model.modules()):
        raise UserError(
            "shard_model: layers of colossalai.legacy.nn are sharded when they are built: leave "
            "shard_model and zero out, or build the model of torch.nn's layers"
        )
    layout = LAYOUTS[mode]
    # Lists: the loops change what they walk through.
    for name, sharding in list(name_shardings(model, mode)):
        full = model.get_parameter(name)
        local = nn.Parameter(sharding.cut(full.detach()), requires_grad=full.requires_grad)
        # `gather_full`, `sum_partial_gradients` and the norm read it.
        local.sharding = sharding
        layer, _, role = name.rpartition(".")
        setattr(model.get_submodule(layer), role, local)
    for name, layer in list(model.named_modules()):
        substitute = _substitute(name, layer, mode, layout)
        if substitute is not None:
            model.set_submodule(name, substitute)
    if layout.samples is not None:
        # Here a batch is cut: the rank computes on its samples, and the logits are gathered again.
        size = gpc.get_world_size(layout.samples)
        rank = gpc.get_local_rank(layout.samples)
        # [B, C, Y, X] to [B / size, C, Y, X]
        model.register_forward_pre_hook(lambda _, args: args[0].unflatten(0, (size, -1))[rank])
        # Its backward pass takes the gradients of this rank's samples.
        model.register_forward_hook(
            lambda _, args, logits: gather_forward_split_backward(logits, layout.samples, 0)
        )
    return model


def _substitute(name: str, layer: nn.Module, mode: str, layout: Layout) -> nn.Module | None:
    """Return the replacement of ``layer`` with sharded parameters; None if it stays."""
    first, second = SHARDED_PAIRS[mode]
    if name.endswith(FIRST_LAYERS):
        return first(layer.weight, layer.bias)
    if name.endswith(SECOND_LAYERS):
        return second(layer.weight, layer.bias)
    # Every mode splits the hidden channels: each rank needs a mask of its own.
    if name.endswith(".drop1") or (layout.channels and isinstance(layer, nn.Dropout)):
        return RankSeeded(layer, gpc.get_local_rank(TENSOR)) if layer.p else None
    if layout.channels is None:
        return None
    if name == "head":
        return RowLinear(layer.weight, layer.bias, layout.channels)
    if name.endswith(".drop_path") and getattr(layer, "rate", 0):
        # Ranks with the same samples drop the same ones, whichever channels they have.
        return RankSeeded(layer, gpc.get_local_rank(layout.samples))
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        bias = getattr(layer, "bias", None)
        return ShardedNorm(layer.weight, bias, layer.eps, layout.channels)
    return None


def named_shards(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the local parameters by name. The optimizer updates these."""
    # With `zero` the model's own parameters are FSDP's DTensors.
    return getattr(model, "shards", None) or dict(model.named_parameters())


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a checkpoint by name: the running statistics of batch norms."""
    # Not by `state_dict`, for which upstream's layers communicate.
    return {
        f"{path}.{name}".removeprefix("."): buffer
        for path, layer in model.named_modules()
        for name, buffer in layer._buffers.items()
        if buffer is not None and name not in layer._non_persistent_buffers_set
    }


def local_state(model: nn.Module) -> dict[str, Any]:
    """Return a checkpoint's local tensors by name: `named_shards`, then `persistent_buffers`."""
    return named_shards(model) | persistent_buffers(model)


def broadcast_buffers(model: nn.Module) -> None:
    """Give all data-parallel ranks the first one's `persistent_buffers`."""
    ranks = gpc.get_ranks_in_group(ParallelMode.DATA)
    if len(ranks) == 1:
        return
    group = gpc.get_group(ParallelMode.DATA)
    for buffer in persistent_buffers(model).values():
        dist.broadcast(buffer, ranks[0], group=group)


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the unsharded parameter."""
    return getattr(parameter, "sharding", parameter).shape


@torch.no_grad()
def gather_full(parameter: nn.Parameter, value: Tensor | None = None) -> Tensor | None:
    """Gather ``parameter``, or a ``value`` sharded like it (gradient, moment).

    All ranks of `sharing_group` must call it. Its first rank gets the full tensor, the others None.
    A tensor that is not sharded is returned as it is, on all ranks.
    """
    value = parameter.detach() if value is None else value
    if not hasattr(parameter, "sharding"):
        return value
    group = sharing_group([parameter])
    shardings = [parameter.sharding] if gpc.get_local_rank(group) == 0 else []
    others: list[list[Tensor]] = [[] for _ in gpc.get_ranks_in_group(group)[1:]]
    full_tensors = _gather(group, [[value], *others], shardings)
    return full_tensors[0] if full_tensors else None


def sharing_group(parameters: Sequence[Tensor]) -> ParallelMode:
    """Return the group over which a model is sharded, given any of its sharded parameters."""
    # ZeRO shards over the data-parallel ranks too
    is_zero = parameters and parameters[0].sharding.part is not None
    return ParallelMode.GLOBAL if is_zero else TENSOR


def local_shard(parameter: nn.Parameter, full: Tensor) -> Tensor:
    """Return this rank's shard of ``full`` [`full_shape`]; the inverse of `gather_full`."""
    sharding = getattr(parameter, "sharding", None)
    return full if sharding is None else sharding.cut(full)


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    """Return whether any of ``parameters``, those of a model, is sharded."""
    return any(hasattr(parameter, "sharding") for parameter in parameters)


@torch.no_grad()
def map_full(
    function: Callable[[list[Tensor]], Sequence[Tensor]],
    parameters: Sequence[Tensor],
    values: Sequence[Tensor],
) -> list[Tensor]:
    """Return this rank's shards of ``function(full tensors)``; two collectives.

    ``values`` are sharded like their ``parameters``. Rank i of the R ranks that share a model
    gathers and computes tensors i, i + R, i + 2 R, ..., and sends each rank its shards of the
    results. ``function`` returns a tensor for each that it is given.
    """
    group = sharing_group(parameters)
    ranks = gpc.get_ranks_in_group(group)
    shardings = [parameter.sharding for parameter in parameters]
    by_owner = [slice(owner, None, len(ranks)) for owner in range(len(ranks))]
    local = by_owner[gpc.get_local_rank(group)]
    full_tensors = _gather(group, [values[owner] for owner in by_owner], shardings[local])
    # There may be fewer tensors than ranks.
    results = function(full_tensors) if full_tensors else []
    sent = [list(map(Sharding.cut, shardings[local], results, repeat(rank))) for rank in ranks]
    shapes = [value.shape for value in values]
    received = _exchange(group, sent, [shapes[owner] for owner in by_owner], values[0])
    return [received[number % len(ranks)][number // len(ranks)] for number in range(len(values))]


def _gather(
    group: ParallelMode, values_by_owner: Sequence[Sequence[Tensor]], shardings: Sequence[Sharding]
) -> list[Tensor]:
    """Return the full tensors of this rank, one for each of ``shardings``; one collective.

    ``values_by_owner`` are this rank's shards of the full tensors of each rank of ``group``.
    """
    ranks = gpc.get_ranks_in_group(group)
    like, *_ = chain(*values_by_owner)
    shapes = [list(map(Sharding.local_shape, shardings, repeat(rank))) for rank in ranks]
    full_tensors = [like.new_empty(sharding.shape) for sharding in shardings]
    received = _exchange(group, values_by_owner, shapes, like)
    for rank, tensors in zip(ranks, received, strict=True):
        for sharding, local, full in zip(shardings, tensors, full_tensors, strict=True):
            sharding.write(local, full, rank)
    return full_tensors


def _exchange(
    group: ParallelMode,
    tensors_by_rank: Sequence[Sequence[Tensor]],
    shapes_by_rank: Sequence[Sequence[Sequence[int]]],
    like: Tensor,
) -> list[Sequence[Tensor]]:
    """Send each rank of ``group`` its tensors; return what each has sent. All are ``like`` one."""
    flat = torch.cat([like.new_empty(0), *map(torch.flatten, chain(*tensors_by_rank))])
    to_send = [sum(map(Tensor.numel, tensors)) for tensors in tensors_by_rank]
    to_receive = [sum(map(prod, shapes)) for shapes in shapes_by_rank]
    received = like.new_empty(sum(to_receive))
    dist.all_to_all_single(received, flat, to_receive, to_send, group=gpc.get_group(group))
    results = []
    for message, shapes in zip(received.split(to_receive), shapes_by_rank, strict=True):
        tensors = message.split([*map(prod, shapes)])
        results.append(list(map(Tensor.view, tensors, shapes)))
    return results


def full_model_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the full parameters and buffers of a model by name, gathered one after the other.

    Ranks for which `gather_full` returns None leave the parameter out.
    """
    for name, local in local_state(model).items():
        full = gather_full(local)
        if full is not None:
            yield name, full


@torch.no_grad()
def load_full_model_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy full parameters and buffers into a model that may be sharded."""
    for name, local in local_state(model).items():
        local.copy_(local_shard(local, state[name]))


def full_optimizer_state(
    model: nn.Module, optimizer: Optimizer
) -> Iterator[tuple[str, Tensor | None]]:
    """Gather the optimizer's states with `gather_full`, as ``<state>/<parameter>`` and a tensor."""
    for name, parameter in named_shards(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                # Others, such as a number of steps or the means of rows, are equal on all ranks.
                is_like = value.shape == parameter.shape
                yield f"{key}/{name}", gather_full(parameter, value) if is_like else value


def load_full_optimizer_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Tensor]
) -> None:
    """Give every parameter its shard of what `full_optimizer_state` has gathered."""
    parameters = named_shards(model)
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for entry, full in state.items():
        key, _, name = entry.partition("/")
        parameter = parameters[name]
        # A parameter that was trained before may be frozen now.
        if parameter in trained:
            is_like = full.shape == full_shape(parameter)
            value = local_shard(parameter, full) if is_like else full
            optimizer.state[parameter][key] = value
    # This brings each state to the optimizer's device and dtype.
    optimizer.load_state_dict(optimizer.state_dict())


def sum_partial_gradients(parameters: Iterable[Tensor]) -> None:
    """Sum the gradients of replicas with different samples, in place; one all-reduce per group."""
    grads_by_group = defaultdict(list)
    for parameter in parameters:
        group = getattr(parameter, "sharding", Sharding()).summed_over
        if group is not None and parameter.grad is not None:
            grads_by_group[group].append(parameter.grad)
    for group, grads in grads_by_group.items():
        if gpc.get_world_size(group) > 1:
            torch._foreach_copy_(grads, sum_over(group, grads))


def sum_over(group: ParallelMode, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of ``tensors`` over the ranks of ``group``, by one all-reduce."""
    # Many small messages take longer than the copies into one.
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=gpc.get_group(group))
    sums = flat.split([tensor.numel() for tensor in tensors])
    return [total.view_as(tensor) for total, tensor in zip(sums, tensors, strict=True)]


def grad_norms(parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Return the 2-norm of each local gradient, a 0-dim tensor, by parameter.

    At least in float32: float16 ends at 65,504.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    grads: list[Any] = [parameter.grad for parameter in trained]
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    return dict(zip(trained, torch._foreach_norm(grads, 2, dtype), strict=True))


def global_grad_norm(norms: Mapping[Tensor, Tensor]) -> Tensor:
    """Return the 2-norm of the full model's gradient, a 0-dim tensor; one all-reduce if sharded.

    ``norms`` are those of `grad_norms`.

    Upstream clips by the norm of each rank's shards (legacy/engine/_base_engine.py:161), so
    replicas diverge.
    """
    # Data-parallel ranks have the same gradient by now.
    if not is_sharded(norms):
        return torch.stack([*norms.values()]).norm()
    # Where n ranks have a copy, each counts 1 / n: the sum over ranks has every element once.
    norms_by_copies = defaultdict(list)
    for parameter, norm in norms.items():
        norms_by_copies[parameter.sharding.copies].append(norm)
    square = sum(
        torch.stack(group).norm().square() / copies for copies, group in norms_by_copies.items()
    )
    dist.all_reduce(square, group=gpc.get_group(sharing_group([*norms])))
    return square.sqrt()


def build_reduce_norms() -> Callable[[Tensor, list[Tensor]], Tensor]:
    """Return a function of R rows of squared norms of P shards, [R, P], and their parameters.

    It returns the squared norms of the full tensors, by one all-reduce. R rows are norms of R
    different tensors (the weight, the update) of each parameter.
    """

    @cache  # each call would copy the list to the GPU again
    def shares(copies: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        # Where n ranks have a copy, each counts 1 / n.
        return torch.tensor([1 / number for number in copies], dtype=dtype, device=device)

    def reduce_norms(squares_RP: Tensor, parameters: list[Tensor]) -> Tensor:
        copies = tuple(parameter.sharding.copies for parameter in parameters)
        squares_RP = squares_RP * shares(copies, squares_RP.dtype, squares_RP.device)
        dist.all_reduce(squares_RP, group=gpc.get_group(sharing_group(parameters)))
        return squares_RP

    return reduce_norms
