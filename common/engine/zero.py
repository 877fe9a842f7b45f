"""ZeRO (arXiv 1910.02054): state sharded over the data-parallel ranks, by PyTorch's FSDP2.

- ``zero = dict(stage=1)`` shards the optimizer's state. Each step gathers the parameters once and
  reduces each gradient once to the rank that holds its shard: the bytes of an all-reduce. In
  between, each rank has the full parameters and gradients.
- ``stage=3`` shards parameters and gradients too. Every forward and backward pass gathers them
  block by block.

The shards have float32 parameters; in mixed precision the blocks are gathered in half precision.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard as DimensionShard

from common.engine.amp import Cast, build_mixed_precision
from common.engine.linear_pairs import BRANCHES
from common.engine.tensor_parallel.layout import Sharding
from common.engine.tensor_parallel.sharding import shard_tensor_parallel
from common.engine.upstream import ParallelMode, get_accelerator, gpc
from common.errors import UserError

DATA = ParallelMode.DATA


def check_zero(config: Mapping[str, Any]) -> None:
    """Raise `UserError` for keys that contradict ``zero``; ``parallel`` is resolved."""
    zero = config.get("zero")
    if not zero:
        return
    mode = config["parallel"]["tensor"]["mode"]
    opt_level = (config.get("fp16") or {}).get("opt_level")
    compiled = config.get("COMPILE")
    torch_ddp = config.get("torch_ddp")
    # Each has: whether it contradicts ``zero``, the key and its value, a value that does not.
    rules = (
        (mode not in (None, "1d"), f"parallel.tensor.mode={mode!r}", "'1d' or None"),
        (opt_level == "O3", "fp16.opt_level='O3'", "'O2'"),
        (compiled == "model", f"COMPILE={compiled!r}", "True"),
        (bool(torch_ddp), f"torch_ddp={torch_ddp}", "dict()"),
    )
    for contradicts, key, remedy in rules:
        if contradicts:
            raise UserError(
                f"zero={dict(zero)} does not support {key}: set it to {remedy}, or zero=None"
            )


def shard_model(model: nn.Module) -> nn.Module:
    """Shard a Vision Transformer in place, as the launch's ``parallel`` and ``zero`` say.

    Call it after the launch and before building the optimizer, with equal weights on all ranks. See
    `shard_tensor_parallel`; ``zero`` has no effect on a single data-parallel rank.
    """
    model = shard_tensor_parallel(model)
    if gpc.config.get("zero") and gpc.get_world_size(DATA) > 1:
        _shard_data_parallel(model)
    return model


def _shard_data_parallel(model: nn.Module) -> None:
    """Shard ``model`` and set ``model.shards``: the local tensors by name, which the optimizer has.

    They share memory with FSDP's DTensors, on which an update is slower, and LAMB's norms cannot be
    reduced at once.
    """
    size = gpc.get_world_size(DATA)
    # Tensor parallelism has sharded the parameters before. This cuts a part of those shards.
    shardings = {
        name: getattr(parameter, "sharding", None) or Sharding(shape=tuple(parameter.shape))
        for name, parameter in model.named_parameters()
    }
    _apply_fsdp(model, size)
    model.shards = {}
    for name, source in model.named_parameters():
        shard = nn.Parameter(source.to_local().detach(), source.requires_grad)
        shard.source = source
        shard.sharding = replace(shardings[name], part=_placement_dim(source.shape, size))
        model.shards[name] = shard


def _apply_fsdp(model: nn.Module, size: int) -> None:
    """Let FSDP2 shard each block, and then what is outside of blocks."""
    device = get_accelerator().get_current_device()
    # The planner's tensors are fake, but a mesh reads its ranks from a tensor.
    with unset_fake_temporarily():
        mesh = DeviceMesh.from_group(gpc.get_group(DATA), device.type)
    options: dict[str, Any] = dict(
        mesh=mesh,
        shard_placement_fn=lambda parameter: DimensionShard(_placement_dim(parameter.shape, size)),
    )
    precision = build_mixed_precision(gpc.config.get("fp16"), device.type)
    gathered = precision.dtype if precision.cast in (Cast.OPERATIONS, Cast.LAYERS) else None
    policy = MixedPrecisionPolicy(gathered, torch.float32, cast_forward_inputs=False)
    for block in _blocks(model):
        branches = [layer for name, layer in block.named_children() if name in BRANCHES]
        if branches and all(map(_is_linear, branches)):
            # Only these are gathered in half precision: norms and LayerScale stay in float32, with
            # what is outside of blocks.
            fully_shard(branches, mp_policy=policy, **options)
        else:
            fully_shard(block, **options)
    fully_shard(model, **options)
    for layer in model.modules():
        if isinstance(layer, FSDPModule):
            # Not every version of gloo can average.
            layer.set_force_sum_reduction_for_comms(True)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model, those of its stages where it has stages."""
    for part in getattr(model, "blocks", ()):
        # Some of timm's models never call a stage itself: FSDP's hooks would not gather for it.
        if type(part) in (nn.ModuleList, nn.Sequential):
            yield from part
        else:
            yield part


def _is_linear(branch: nn.Module) -> bool:
    """Return whether all layers with parameters in ``branch`` are linear, of whatever kind."""
    # By the name of the class: our sharded layers are no subclasses of `nn.Linear`.
    with_parameters = [layer for layer in branch.modules() if layer._parameters]
    return all("Linear" in type(layer).__name__ for layer in with_parameters)


def _placement_dim(shape: torch.Size, size: int) -> int:
    """Return the dimension to shard: the first, which FSDP pads, or D of tokens [1, N, D]."""
    # Dimension 0 of tokens has length 1: only rank 0 would get a shard.
    return 2 if len(shape) == 3 and shape[2] % size == 0 else 0


def set_communication(model: FSDPModule, is_training: bool, is_last: bool) -> None:
    """Set what the next forward and backward pass gathers, keeps and reduces.

    ``is_last`` says that the pass is the last of the step.
    """
    is_sharded = gpc.config["zero"]["stage"] == 3
    # Evaluation must not keep full parameters, which an update of the shards would not change.
    model.set_reshard_after_forward(is_sharded or not is_training)
    # The root's parameters are the first that the backward pass needs.
    model.set_reshard_after_forward(not is_training, recurse=False)
    # With stage 1 full gradients add up over the micro-batches; the last pass reduces the sum.
    model.set_reshard_after_backward(is_sharded or is_last)
    model.set_requires_gradient_sync(is_sharded or is_last)


def collect_gradients(parameters: Iterable[Tensor]) -> None:
    """Move the gradients that FSDP has reduced to the tensors in ``model.shards``."""
    for parameter in parameters:
        source = getattr(parameter, "source", None)
        if source is not None and source.grad is not None:
            grad = source.grad.to_local()
            # FSDP would add the next step's gradient to it.
            source.grad = None
            # A gradient that is there already is the NaN of `StepOptimizer._poison`.
            parameter.grad = grad if parameter.grad is None else grad + parameter.grad
