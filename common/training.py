"""Model, optimizer and engine in the mode of the launch, for planner and tests.

A run's whole sequence is a train.py's, which users read, copy and change, or `common.run.train`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from common.engine.engine import Engine, initialize
from common.engine.zero import shard_model
from common.model.build import build_model, freeze
from common.optim.build import build_optimizer


class Training(NamedTuple):
    model: nn.Module
    optimizer: Optimizer
    engine: Engine


def build_training(
    config: Mapping[str, Any],
    criterion: Callable[..., Tensor] | None = None,
    *,
    model: nn.Module | None = None,
) -> Training:
    """Build what a train.py builds, in its order.

    ``model`` is not sharded yet; by default it is built from ``MODEL``.
    """
    model = build_model(**config["MODEL"]) if model is None else model
    freeze(model, config.get("FREEZE"))
    model = shard_model(model)
    rates = dict(learning_rate=config["LEARNING_RATE"], weight_decay=config["WEIGHT_DECAY"])
    optimizer = build_optimizer(model, **rates, **config["OPTIMIZER"])
    engine, *_ = initialize(model, optimizer, criterion)
    return Training(model, optimizer, engine)
