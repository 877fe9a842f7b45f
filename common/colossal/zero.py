"""ZeRO (arXiv 1910.02054): model and optimizer state, sharded over the data-parallel ranks by
PyTorch's FSDP2.

- ``zero = dict(stage=1)`` shards the optimizer's state. Each step gathers the parameters once and
  reduces each gradient
  to the rank that holds its shard once: the bytes of an all-reduce. Parameters and gradients are
  whole in between.
- ``stage=3`` shards parameters and gradients too. Every forward and backward pass gathers them
  block by block.

The shards have float32 parameters; in mixed precision the blocks are gathered in half precision.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard as DimensionShard

from common.colossal.amp import Cast, build_mixed_precision
from common.colossal.tensor_parallel.layout import Shard
from common.colossal.tensor_parallel.sharding import shard_tensor_parallel
from common.colossal.upstream import ParallelMode, get_accelerator, gpc
from common.errors import UserError

DATA = ParallelMode.DATA


def check_zero(config: Mapping[str, Any]) -> None:
    """Raise `UserError` for keys that contradict ``zero``; ``parallel`` is resolved."""
    if not (zero := config.get("zero")):
        return
    mode, fp16 = config["parallel"]["tensor"]["mode"], config.get("fp16") or {}
    contradictions = {
        f"parallel.tensor.mode={mode!r}": ("'1d' or None", mode not in (None, "1d")),
        "fp16.opt_level='O3'": ("'O2'", fp16.get("opt_level") == "O3"),
        f"COMPILE={config.get('COMPILE')!r}": ("True", config.get("COMPILE") == "model"),
        f"torch_ddp={config.get('torch_ddp')}": ("dict()", bool(config.get("torch_ddp"))),
    }
    for key, (remedy, is_wrong) in contradictions.items():
        if is_wrong:
            raise UserError(
                f"zero={dict(zero)} does not support {key}: set it to {remedy}, or zero=None"
            )


def shard_model(model: nn.Module) -> nn.Module:
    """Replace a Vision Transformer in place by this rank's shard, in the launch's ``parallel`` and
    ``zero``.

    Call it after the launch and before building the optimizer, with equal weights on all ranks. See
    `shard_tensor_parallel`; ``zero`` has no effect on a single data-parallel rank.
    """
    model = shard_tensor_parallel(model)
    if gpc.config.get("zero") and gpc.get_world_size(DATA) > 1:
        _shard_data_parallel(model)
    return model


def _shard_data_parallel(model: nn.Module) -> None:
    """Shard ``model`` and set ``model.shards``: plain tensors that share memory with FSDP's, by
    name.

    The optimizer updates these, because it is faster on them than on DTensors, and LAMB's norms can
    be reduced at once.
    """
    device, size = get_accelerator().get_current_device(), gpc.get_world_size(DATA)
    with unset_fake_temporarily():
        mesh = DeviceMesh.from_group(gpc.get_group(DATA), device.type)
    precision = build_mixed_precision(gpc.config.get("fp16"), device.type)
    gathered = precision.dtype if precision.cast in (Cast.OPERATIONS, Cast.LAYERS) else None
    whole = {
        name: getattr(p, "shard", None) or Shard(shape=tuple(p.shape))
        for name, p in model.named_parameters()
    }
    options: dict[str, Any] = dict(
        mesh=mesh,
        shard_placement_fn=lambda parameter: DimensionShard(_placement_dim(parameter.shape, size)),
    )
    policy = MixedPrecisionPolicy(gathered, torch.float32, cast_forward_inputs=False)
    stages = (
        [one] if type(one) not in (nn.ModuleList, nn.Sequential) else one
        for one in getattr(model, "blocks", ())
    )
    for block in chain.from_iterable(
        stages
    ):  # of some of timm's models, which never call a stage itself
        computed_in_half = [
            layer for name, layer in block.named_children() if name in ("attn", "mlp")
        ]
        with_weights = [
            layer for part in computed_in_half for layer in part.modules() if layer._parameters
        ]
        if computed_in_half and all("Linear" in type(layer).__name__ for layer in with_weights):
            fully_shard(computed_in_half, mp_policy=policy, **options)
        else:
            fully_shard(block, **options)
    fully_shard(model, **options)
    for layer in model.modules():
        if isinstance(layer, FSDPModule):
            layer.set_force_sum_reduction_for_comms(True)  # not every gloo has an average
    model.shards = {}
    for name, source in model.named_parameters():
        dim = _placement_dim(source.shape, size)
        start = min(-(-source.shape[dim] // size) * gpc.get_local_rank(DATA), source.shape[dim])
        shard = nn.Parameter(source.to_local().detach(), source.requires_grad)
        shard.source, shard.shard = (
            source,
            replace(whole[name], part=(dim, start, shard.shape[dim])),
        )
        model.shards[name] = shard


def _placement_dim(shape: torch.Size, size: int) -> int:
    """Return the dimension to shard: the channels of tokens [1, N, D] if they divide, else 0, which
    FSDP pads.
    """
    return 2 if len(shape) == 3 and shape[2] % size == 0 else 0


def set_communication(model: FSDPModule, is_training: bool, is_last: bool) -> None:
    """Set what the next forward and backward pass gathers, keeps and reduces; ``is_last``: of the
    step.
    """
    is_sharded = gpc.config["zero"]["stage"] == 3
    # evaluation must not keep whole parameters, which the weights that follow would not change
    model.set_reshard_after_forward(is_sharded or not is_training)
    model.set_reshard_after_forward(
        not is_training, recurse=False
    )  # the backward pass begins with these
    model.set_reshard_after_backward(is_sharded or is_last)
    model.set_requires_gradient_sync(is_sharded or is_last)


def collect_gradients(parameters: Iterable[Tensor]) -> None:
    """Move the gradients that FSDP has reduced to the tensors in ``model.shards``."""
    for parameter in parameters:
        source = getattr(parameter, "source", None)
        if source is not None and source.grad is not None:
            grad = source.grad.to_local()  # parameter.grad, if any, is by `StepOptimizer._poison`
            parameter.grad, source.grad = (
                grad if parameter.grad is None else grad + parameter.grad,
                None,
            )
