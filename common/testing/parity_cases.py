"""Parallel modes, a tiny model and its data for tests, and training it in any mode."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.engine.engine import Engine
from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook, ParallelMode, gpc
from common.model.build import build_model
from common.optim import build
from common.testing.ranks import launched
from common.training import build_training


def tensor_parallel(mode: str, size: int, **depth: int) -> dict[str, Any]:
    return {"parallel": {"tensor": {"mode": mode, "size": size, **depth}}}


# name: (processes, the config)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "none": (1, {}),
    "dp2": (2, {}),
    "1d-2": (2, tensor_parallel("1d", 2)),
    "1d-4": (4, tensor_parallel("1d", 4)),
    "2d-4": (4, tensor_parallel("2d", 4)),
    "2.5d-4": (4, tensor_parallel("2.5d", 4, depth=1)),
    "2.5d-8": (8, tensor_parallel("2.5d", 8, depth=2)),
    "3d-8": (8, tensor_parallel("3d", 8)),
    "dp2 x 1d-2": (4, tensor_parallel("1d", 2)),
    "dp2 x 2d-4": (8, tensor_parallel("2d", 4)),
    "dp2 x 2.5d-8": (16, tensor_parallel("2.5d", 8, depth=2)),
    "dp2 x 3d-8": (16, tensor_parallel("3d", 8)),
    "zero 1": (2, {"zero": {"stage": 1}}),
    "zero 3": (4, {"zero": {"stage": 3}}),
    "zero 1 x 1d-2": (4, tensor_parallel("1d", 2) | {"zero": {"stage": 1}}),
    "zero 3 x 1d-2": (4, tensor_parallel("1d", 2) | {"zero": {"stage": 3}}),
}
MODEL = {
    "image_size": 16,
    "patch_size": 4,
    "width": 32,
    "depth": 2,
    "heads": 4,
    "mlp_ratio": 2.0,
    "num_classes": 8,
}
MODERN = {"norm": "rmsnorm", "mlp": "swiglu"}
MICRO_BATCH = 16  # images over all data-parallel ranks together
ACCUMULATION = 2
STEPS = 2
MAX_NORM = 0.3
launched_clipping = partial(launched, clip_grad_norm=MAX_NORM, gradient_accumulation=ACCUMULATION)
# every optimizer, a new one too
COMMON = {"learning_rate": 2e-3, "weight_decay": 0.1, "layer_decay": 0.65}
OPTIMIZERS = dict.fromkeys(build.OPTIMIZERS, COMMON) | {
    "lamb": {
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "layer_decay": 0.65,
        "decay_all": False,
        "max_grad_norm": 0.1,
        "bias_correction": True,
    },
    "muon": COMMON | {"filters": True},
    "sgd": {"learning_rate": 0.5, "weight_decay": 0.01, "layer_decay": 0.65},
}
Batch = tuple[Tensor, dict[str, Tensor]]


def build_tiny_model(**arguments: Any) -> nn.Module:
    """Build the model with random weights, norms and biases too."""
    torch.manual_seed(0)
    model = build_model(**MODEL | arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def blended_loss(logits: Tensor, target: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """Return the loss of Mixup with label smoothing."""
    losses = (F.cross_entropy(logits, labels, label_smoothing=0.1) for labels in (other, target))
    return torch.lerp(*losses, share)


def micro_batches(steps: int = STEPS, dp_rank: int = 0, dp_size: int = 1) -> Iterator[Batch]:
    """Yield a data-parallel rank's micro-batches: images, and the arguments of `blended_loss`."""
    generator = torch.Generator().manual_seed(1)
    for number in range(steps * ACCUMULATION):
        side = 16 if number < ACCUMULATION else 8  # pixels: IMAGE_SIZES changes them in a run
        images = torch.randn(MICRO_BATCH, 3, side, side, generator=generator)
        labels = torch.randint(MODEL["num_classes"], (2, MICRO_BATCH), generator=generator)
        target, other = labels.chunk(dp_size, dim=1)[dp_rank]
        share = torch.rand((), generator=generator)
        yield images.chunk(dp_size)[dp_rank], {"target": target, "other": other, "share": share}


class Losses(BaseHook):
    """Record the loss of every micro-batch, averaged over all data-parallel ranks."""

    def __init__(self) -> None:
        super().__init__(priority=0)
        self.values: list[float] = []

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Any, loss: Tensor) -> None:
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean, group=gpc.get_group(ParallelMode.DATA))
        self.values.append(mean.item() / gpc.get_world_size(ParallelMode.DATA))


def build_engine(
    optimizer_name: str,
    criterion: Callable[..., Tensor] = blended_loss,
    frozen: str | None = None,
    **arguments: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, Engine]:
    """Build model, optimizer and engine in the mode of the launch."""
    options = dict(OPTIMIZERS[optimizer_name], name=optimizer_name)
    rates = {
        "LEARNING_RATE": options.pop("learning_rate"),
        "WEIGHT_DECAY": options.pop("weight_decay"),
    }
    config = {"FREEZE": frozen, "OPTIMIZER": options, **rates}
    return build_training(config, criterion, model=build_tiny_model(**arguments))[:3]


def fit(engine: Engine, steps: int = STEPS, bad_rank: int = -1) -> list[float]:
    """Train through the trainer; return the losses of all ranks' micro-batches.

    The first step and the second follow one that all ranks have to skip: on ``bad_rank``, by
    default the last, whose shards with ``zero`` may be empty, its second micro-batch has no label,
    so that cross-entropy is NaN and its gradient 0.
    """
    rank = gpc.get_local_rank(ParallelMode.DATA)
    size = gpc.get_world_size(ParallelMode.DATA)
    first, second, *others = micro_batches(steps, rank, size)
    images, labels = second
    if gpc.get_global_rank() == bad_rank % gpc.get_world_size(ParallelMode.GLOBAL):
        missing = torch.full_like(labels["target"], -100)
        labels = labels | {"target": missing, "other": missing}
    skipped = [first, (images, labels)]
    losses = Losses()
    batches = [*skipped, first, second, *skipped, *others]
    Trainer(engine).fit(batches, 1, hooks=[losses])
    optimizer = engine.optimizer
    assert list(optimizer.counter.state_dict().values()) == [steps + 2, 2, 0]
    assert optimizer.scaler is None or optimizer.scaler.get_scale() == 2.0**14  # halved twice
    return losses.values[2:4] + losses.values[6:]
