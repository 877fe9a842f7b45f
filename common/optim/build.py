"""The table of optimizers, and building one for a model.

LAMB and Muon are ours, AdamW is PyTorch's, SGD a subclass of PyTorch's. All skip an update on the
device, without the host knowing, where ``found_inf`` is set.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from math import prod
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from common.engine.linear_pairs import count_matrices
from common.engine.tensor_parallel.sharding import (
    build_reduce_norms,
    full_shape,
    is_sharded,
    map_full,
    named_shards,
)
from common.errors import UserError
from common.files import Values
from common.optim.lamb import Lamb
from common.optim.muon import Muon
from common.optim.sgd import FusedSGD

ADAM = ("step", "exp_avg", "exp_avg_sq")
BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class OptimizerEntry:
    """What the config, the planner, a checkpoint and `build_optimizer` know of an optimizer."""

    build: Callable[..., Optimizer]
    # The keys of the config's OPTIMIZER that are arguments of ``build``. For None it decides.
    defaults: Values
    # The tensors of a parameter's shape that it keeps, and "step", a number. Smaller ones, such as
    # the means of a matrix's rows, need no entry, but must be equal on all ranks.
    state: tuple[str, ...]
    # Numbers that the kernels of an update read and write for each parameter. AdamW: 7, as it reads
    # the weight, its gradient and two moments, and writes all but the gradient.
    traffic: int
    matrix_state: tuple[str, ...] | None = None  # in place of ``state`` for a matrix of a block
    # Further arguments of ``build``, for the model.
    of_model: Callable[[nn.Module], dict[str, Any]] = lambda _: {}


def _muon_arguments(model: nn.Module) -> dict[str, Any]:
    """Return the matrices that Muon updates, and how to gather those that are sharded."""
    matrices = {}
    shards = named_shards(model)
    shapes = {name: full_shape(parameter) for name, parameter in shards.items()}
    for name, parameter in shards.items():
        count = count_matrices(name, shapes)
        shape = shapes[name]
        if count:
            matrices[parameter] = (count, shape[0] // count, shape[1])
        elif len(shape) == 4:  # the filters of a convolution
            matrices[parameter] = (1, shape[0], prod(shape[1:]))
    return {"matrices": matrices, "map_full": map_full if is_sharded(matrices) else None}


def _lamb_arguments(model: nn.Module) -> dict[str, Any]:
    """Return how LAMB gets the norm of a parameter from those of its shards."""
    has_shards = is_sharded(named_shards(model).values())
    return {"reduce_norms": build_reduce_norms() if has_shards else None}


OPTIMIZERS = {
    "lamb": OptimizerEntry(
        Lamb,
        # None: the variant decides.
        defaults=dict(
            betas=BETAS,
            eps=None,
            variant="colossalai",
            bias_correction=None,
            max_grad_norm=None,
            always_adapt=None,
            trust_range=None,
        ),
        state=ADAM,
        traffic=14,
        of_model=_lamb_arguments,
    ),
    "adamw": OptimizerEntry(
        # The others would make the host wait for `found_inf`.
        partial(AdamW, fused=True),
        defaults=dict(betas=BETAS, eps=1e-8),
        state=ADAM,
        traffic=7,
    ),
    "muon": OptimizerEntry(
        Muon,
        defaults=dict(
            betas=BETAS,
            eps=1e-8,
            momentum=0.95,
            adamw_lr_scale=1.0,
            bfloat16=False,
            filters=False,
        ),
        state=ADAM,
        traffic=8,
        matrix_state=("momentum_buffer",),
        of_model=_muon_arguments,
    ),
    "sgd": OptimizerEntry(
        FusedSGD,
        defaults=dict(momentum=0.9, dampening=0.0, nesterov=False),
        state=("momentum_buffer",),
        traffic=5,
    ),
}


def state_names(options: Values, is_matrix: bool) -> tuple[str, ...]:
    """Return the names of the tensors that an optimizer keeps for a parameter.

    ``options`` is the config's OPTIMIZER; ``is_matrix`` says whether it is one of a block's.
    """
    entry = OPTIMIZERS[options["name"]]
    # Torch's SGD keeps no state without momentum, the only optimizer whose state an option removes.
    if options["name"] == "sgd" and options.get("momentum") == 0:
        return ()
    if entry.matrix_state is not None and is_matrix:
        return entry.matrix_state
    return entry.state


def build_optimizer(
    model: nn.Module,
    name: str = "adamw",
    learning_rate: float = 1e-3,
    weight_decay: float = 0.0,
    decay_all: bool = True,
    layer_decay: float = 1.0,
    **options: Any,
) -> Optimizer:
    """Build the optimizer ``name``, a key of `OPTIMIZERS`, for the trained parameters of a model.

    The model may be sharded. Weight decay is on every tensor, unless ``decay_all`` is false: then
    not on vectors (biases, norms) and what the model's ``no_weight_decay`` names, as in timm. A
    parameter's learning rate is multiplied by ``layer_decay`` for each layer between it and the
    head, as by timm's `param_groups_layer_decay` (BEiT, arXiv 2106.08254). ``options`` replace the
    optimizer's ``defaults`` in `OPTIMIZERS`.

    Raises `UserError` for a value that the optimizer refuses, TypeError for an unknown option.
    """
    groups = _parameter_groups(model, learning_rate, decay_all, layer_decay)
    entry = OPTIMIZERS[name]
    defaults = {name: value for name, value in entry.defaults.items() if value is not None}
    arguments = {**defaults, **options, **entry.of_model(model)}
    try:
        return entry.build(groups, lr=learning_rate, weight_decay=weight_decay, **arguments)
    except ValueError as error:
        raise UserError(f"OPTIMIZER.name={name}: {error}") from error


def _parameter_groups(
    model: nn.Module, learning_rate: float, decay_all: bool, layer_decay: float
) -> list[dict[str, Any]]:
    """Group the trained parameters by weight decay (those with it first) and learning rate."""
    trained = {name: param for name, param in named_shards(model).items() if param.requires_grad}
    above = dict.fromkeys(trained, 0) if layer_decay == 1 else layers_above(model)
    patterns = getattr(model, "no_weight_decay", set)()
    groups: dict[tuple[bool, int], list[nn.Parameter]] = defaultdict(list)
    for name, param in trained.items():
        # The model's names may be patterns, as timm's optimizers take them.
        is_exempt = param.ndim <= 1 or any(fnmatch(name, pattern) for pattern in patterns)
        groups[is_exempt and not decay_all, above[name]].append(param)

    result: list[dict[str, Any]] = []
    for without_decay, layers in sorted(groups):
        group = {
            "params": groups[without_decay, layers],
            "lr": learning_rate * layer_decay**layers,
        }
        if without_decay:
            group["weight_decay"] = 0.0
        result.append(group)
    return result


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
