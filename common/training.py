"""What a train.py builds before it calls `Trainer.fit`, for planner and tests.

A train.py writes the same sequence out: it is what users read, copy and change.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from common.engine.engine import Engine, initialize
from common.engine.zero import shard_model
from common.model.build import build_model, freeze
from common.optim.build import build_optimizer
from common.optim.schedules import build_lr_scheduler


class Training(NamedTuple):
    """The loaders and the schedule are None where not given."""

    model: nn.Module
    optimizer: Optimizer
    engine: Engine
    train_loader: Any
    eval_loader: Any
    lr_scheduler: Any


def build_training(
    config: Mapping[str, Any],
    criterion: Callable[..., Tensor] | None = None,
    *,
    model: nn.Module | None = None,
    loaders: tuple[Any, Any] = (None, None),
    steps: tuple[int, ...] | None = None,
) -> Training:
    """Build what a train.py builds, in its order and in the mode of the launch.

    ``model`` is not sharded yet; by default it is built from ``MODEL``. ``loaders`` are those of
    training and evaluation, ``steps`` the total, warm-up and cool-down steps of the schedule.
    """
    model = build_model(**config["MODEL"]) if model is None else model
    freeze(model, config.get("FREEZE"))
    model = shard_model(model)
    rates = dict(learning_rate=config["LEARNING_RATE"], weight_decay=config["WEIGHT_DECAY"])
    optimizer = build_optimizer(model, **rates, **config["OPTIMIZER"])
    ends = dict(min_lr=config.get("MIN_LR", 0.0), warmup_lr=config.get("WARMUP_LR"))
    schedule = None
    if steps:
        schedule = build_lr_scheduler(optimizer, config["LR_SCHEDULE"], *steps, **ends)
    return Training(model, optimizer, *initialize(model, optimizer, criterion, *loaders, schedule))
