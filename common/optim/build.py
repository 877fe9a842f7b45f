"""The optimizers and the schedules of the learning rate.

LAMB and Muon are ours, AdamW is PyTorch's, SGD a subclass of PyTorch's; all skip an update on the
device (`found_inf`). A schedule is a linear warm-up, then a decay.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from common.colossal import gpc, named_shards, whole_shape
from common.colossal.tensor_parallel.sharding import (
    is_sharded,
    map_whole,
    reduce_norms,
    sharing_group,
)
from common.errors import UserError
from common.optim.lamb import Lamb
from common.optim.muon import Muon, count_matrices


class FusedSGD(SGD):
    """torch's fused SGD, whose momentum starts at 0 where the very first update is skipped.

    torch leaves there what was in the memory before: it takes an empty tensor, which only a kernel
    that is not skipped fills, and from the next update on counts it as momentum
    (torch/optim/sgd.py, `_fused_sgd`). On a CPU it is not fused in half precision, whose kernel
    adds wrong numbers before torch 2.14 (aten/src/ATen/native/cpu/FusedSGDKernel.cpp).
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, fused=True, **options)

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        starting = [p for p in trained if self.state.get(p, {}).get("momentum_buffer") is None]
        if len(starting) < len(trained):  # those of a part of the model that was frozen before
            for p in starting:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        if any(p.is_cpu and p.itemsize < 4 for p in trained):
            self._step_unfused()
            return
        super().step()
        found_inf = getattr(self, "found_inf", None)
        for p in starting:
            momentum = self.state.get(p, {}).get("momentum_buffer")
            if momentum is not None and found_inf is not None:
                momentum.masked_fill_(found_inf.bool(), 0)

    def _step_unfused(self) -> None:
        found_inf = vars(self).pop("found_inf", None)  # which is refused where it is not fused
        if found_inf is None or not found_inf:
            for group in self.param_groups:
                group["fused"] = False
            super().step()
            for group in self.param_groups:
                group["fused"] = True
        if found_inf is not None:
            self.found_inf = found_inf


ADAM = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerEntry:
    """What the config, the planner and `build_optimizer` know of an optimizer.

    ``options`` are the keys of the config's OPTIMIZER for `build`. ``state`` names the tensors that
    it keeps for each parameter: of the parameter's shape, but for "step", a number;
    ``matrix_state`` those for a matrix of a block, if others. ``traffic`` is how many numbers an
    update reads and writes for each parameter. ``of_model`` returns further arguments of ``build``.
    """

    build: Callable[..., Optimizer]
    options: tuple[str, ...]
    state: tuple[str, ...]
    traffic: int
    matrix_state: tuple[str, ...] | None = None
    of_model: Callable[[nn.Module], dict[str, Any]] = lambda _: {}


def _matrices(model: nn.Module) -> dict[str, Any]:
    matrices = {}
    for name, parameter in named_shards(model).items():
        shape = whole_shape(parameter)
        if count := count_matrices(name, shape):
            matrices[parameter] = (count, shape[0] // count, shape[1])
    if not matrices or not is_sharded(matrices):
        return {"matrices": matrices}
    ranks = gpc.get_world_size(sharing_group(list(matrices)))
    return {"matrices": matrices, "map_whole": map_whole, "ranks": ranks}


def _norms(model: nn.Module) -> dict[str, Any]:
    return {"reduce_norms": reduce_norms if is_sharded(named_shards(model).values()) else None}


LAMB_OPTIONS = (
    "betas",
    "eps",
    "variant",
    "bias_correction",
    "max_grad_norm",
    "always_adapt",
    "trust_range",
)
OPTIMIZERS = {
    "lamb": OptimizerEntry(Lamb, LAMB_OPTIONS, ADAM, traffic=14, of_model=_norms),
    "adamw": OptimizerEntry(partial(AdamW, fused=True), ("betas", "eps"), ADAM, traffic=7),
    "muon": OptimizerEntry(
        Muon,
        ("betas", "eps", "momentum", "adamw_lr_scale"),
        ADAM,
        8,
        ("momentum_buffer",),
        _matrices,
    ),
    "sgd": OptimizerEntry(
        partial(FusedSGD, momentum=0.9),
        ("momentum", "dampening", "nesterov"),
        ("momentum_buffer",),
        traffic=5,
    ),
}


def state_names(options: Mapping[str, Any], parameter: str) -> tuple[str, ...]:
    """Return the names of the tensors that the config's OPTIMIZER keeps for a parameter, given by
    name.
    """
    entry = OPTIMIZERS[options["name"]]
    if options["name"] == "sgd" and options.get("momentum") == 0:
        return ()
    return (
        entry.matrix_state
        if entry.matrix_state is not None and count_matrices(parameter)
        else entry.state
    )


def build_optimizer(
    model: nn.Module,
    name: str = "adamw",
    learning_rate: float = 1e-3,
    weight_decay: float = 0.0,
    decay_all: bool = True,
    layer_decay: float = 1.0,
    **options: Any,
) -> Optimizer:
    """Build the optimizer `name`, one of `OPTIMIZERS`, of the parameters that are trained, sharded
    or not.

    Weight decay is on every tensor, unless `decay_all` is false: then not on vectors (biases,
    norms) and what the model's `no_weight_decay` names, as in timm. A parameter's learning rate is
    multiplied by `layer_decay` for each layer between it and the head, as by timm's
    `param_groups_layer_decay` (BEiT, arXiv 2106.08254). `options` are those of
    `common.optim.lamb.Lamb`, `common.optim.muon.Muon`, `torch.optim.AdamW` (betas, eps) or
    `torch.optim.SGD` (momentum, 0.9 by default, dampening, nesterov).

    Raises ValueError for a value that the optimizer refuses, TypeError for an unknown option.
    """
    groups = _parameter_groups(model, learning_rate, decay_all, layer_decay)
    entry = OPTIMIZERS[name]
    return entry.build(
        groups, lr=learning_rate, weight_decay=weight_decay, **entry.of_model(model), **options
    )


def _parameter_groups(
    model: nn.Module, learning_rate: float, decay_all: bool, layer_decay: float
) -> list[dict[str, Any]]:
    """Group the parameters that are trained: with weight decay before without, and by learning
    rate.
    """
    trained = {name: param for name, param in named_shards(model).items() if param.requires_grad}
    above = dict.fromkeys(trained, 0) if layer_decay == 1 else layers_above(model)
    kept = getattr(model, "no_weight_decay", set)()
    groups = defaultdict(list)
    for name, param in trained.items():
        without = not decay_all and (
            param.ndim <= 1 or any(fnmatch(name, pattern) for pattern in kept)
        )
        groups[without, above[name]].append(param)
    return [
        {"params": params, "lr": learning_rate * layer_decay**layers}
        | ({"weight_decay": 0.0} if without else {})
        for (without, layers), params in sorted(groups.items(), key=lambda group: group[0])
    ]


def layers_above(model: nn.Module) -> dict[str, int]:
    """Count for each of a model's parameters the layers between it and the head, as timm does.

    Raises `UserError` for a few of timm's models that do not say their layers.
    """
    from timm.models import group_parameters  # takes a second

    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is None:
        raise UserError(
            f"OPTIMIZER.layer_decay: {type(model).__name__} of timm does not say its layers; leave "
            "it out"
        )
    layers: Any = group_parameters(model, matcher(coarse=False), reverse=True)
    return {name: max(layers.values()) - layer for name, layer in layers.items()}


# The learning rate of an optimizer step, counted from 0, as a fraction of the peak; given the total
# and warm-up steps.
Schedule = Callable[[int, int, int], float]


def linear(step: int, total_steps: int, warmup_steps: int) -> float:
    """Equals Colossal-AI's LinearWarmupLR: 1 / (W + 1) at first, 1 at step W of T, 1 / (T - W) at
    the last.
    """
    return (
        (step + 1) / (warmup_steps + 1)
        if step < warmup_steps
        else 1 - _progress(step, total_steps, warmup_steps)
    )


def cosine(step: int, total_steps: int, warmup_steps: int) -> float:
    """Equals Colossal-AI's CosineAnnealingWarmupLR without its overshoot of the peak, which
    `upstream` repairs.

    1 / W at first, 1 at step W of T, (1 + cos(pi (T - W - 1) / (T - W))) / 2 at the last.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * _progress(step, total_steps, warmup_steps)))


def timm(step: int, total_steps: int, warmup_steps: int) -> float:
    """Equals timm's CosineLRScheduler without `warmup_prefix`: the decay begins at step 0, under
    the warm-up.
    """
    return step / warmup_steps if step < warmup_steps else cosine(step, total_steps, 0)


def _progress(step: int, total_steps: int, warmup_steps: int) -> float:
    return min((step - warmup_steps) / (total_steps - warmup_steps), 1.0)


SCHEDULES: dict[str, Schedule] = {"linear": linear, "cosine": cosine, "timm": timm}


def build_lr_scheduler(
    optimizer: Optimizer,
    name: str,
    total_steps: int,
    warmup_steps: int = 0,
    cooldown_steps: int = 0,
    min_lr: float = 0.0,
    warmup_lr: float | None = None,
) -> LambdaLR:
    """Build the schedule `name`, one of `SCHEDULES`, to be stepped once an optimizer step.

    It decays to `min_lr`, and stays there for the last `cooldown_steps`. With `warmup_lr` the
    warm-up begins there.
    """
    peak = max(group["lr"] for group in optimizer.param_groups)
    low = min_lr / peak

    def factor(step: int) -> float:
        if step < warmup_steps and warmup_lr is not None:
            return (warmup_lr + (peak - warmup_lr) * step / warmup_steps) / peak
        share = SCHEDULES[name](step, total_steps - cooldown_steps, warmup_steps)
        return share if step < warmup_steps else low + (1 - low) * share

    return LambdaLR(optimizer, factor)
