"""Piece: numerical correctness of training."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from common.model.vit import build_model
from common.optim.build import build_optimizer
from common.tools.harness import Row
from gpu.job import MODES, TINY, WEIGHT_DECAY, Job, open_engine, train_step

MODEL = dict(image_size=64, patch_size=16, width=192, depth=4, heads=3, num_classes=10)
STEPS, LEARNING_RATE = 5, 1e-3
OPTIMIZERS = ("adamw", "lamb", "sgd")  # SGD, because the others hardly see a wrong scale
# By the mode's coarsest number format: largest error of a loss, and largest relative error of the last gradient's norm
# and of the weights' change. Some five times a CPU's errors; TF32 as float16, which has as many digits.
TOLERANCES = {"fp32": (1e-5, 1e-3), "tf32": (2e-3, 0.1), "fp16": (2e-3, 0.1), "bf16": (1e-2, 0.2)}


class Expected(NamedTuple):
    """The reference: losses, norm of the last gradient, and all weights before and after."""

    losses: list[float]
    grad_norm: float
    before: Tensor
    after: Tensor


def numerics(job: Job) -> Iterator[Row]:
    """Take steps of AdamW, LAMB and SGD in every precision; compare losses and weights with float64 on a CPU."""
    model, batch = (TINY, 8) if job.tiny else (MODEL, 32)
    random = torch.Generator().manual_seed(1)
    images = torch.randn(STEPS, batch, 3, model["image_size"], model["image_size"], generator=random)
    labels = torch.randint(model["num_classes"], (STEPS, batch), generator=random)
    expected = {optimizer: _reference(model, optimizer, images, labels) for optimizer in OPTIMIZERS}
    for optimizer, (mode, config) in product(OPTIMIZERS, MODES.items()):
        row = {"optimizer": optimizer, "mode": mode} | job.lacks(mode)
        if "not_run" not in row:
            loss_limit, limit = TOLERANCES[mode.split()[-1]]
            row |= _compare(job, model, optimizer, config, images, labels, expected[optimizer])
            row |= {"loss_tolerance": loss_limit, "relative_tolerance": limit}
            is_right = (
                row["loss_error"] <= loss_limit and row["update_error"] <= limit and row["grad_norm_error"] <= limit
            )
            if not is_right or row["skipped"]:
                row["wrong"] = f"{optimizer} {mode}: beyond the tolerance, or updates skipped"
        yield row


def _reference(model: Mapping[str, Any], optimizer: str, images: Tensor, labels: Tensor) -> Expected:
    """Train in float64 on a CPU, with a plain loop."""
    torch.manual_seed(0)
    network = build_model(**model).double()
    step = build_optimizer(network, optimizer, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    before, losses = _flat(network), []
    for batch, target in zip(images.double(), labels, strict=True):
        step.zero_grad()
        loss = F.cross_entropy(network(batch), target)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        step.step()
        losses.append(loss.item())
    return Expected(losses, grad_norm.item(), before, _flat(network))


def _compare(
    job: Job,
    model: Mapping[str, Any],
    optimizer: str,
    config: Mapping[str, Any],
    images: Tensor,
    labels: Tensor,
    expected: Expected,
) -> Row:
    batches = zip(images.to(job.device), labels.to(job.device), strict=True)
    with open_engine(model, config, optimizer, LEARNING_RATE) as engine:
        losses = [train_step(engine, batch).item() for batch in batches]
        weights, skipped = _flat(engine.model), engine.optimizer.skipped
        grad_norm = engine.optimizer.grad_norm.item()
    change = expected.after - expected.before
    return {
        "loss_error": max(abs(loss - value) for loss, value in zip(losses, expected.losses, strict=True)),
        "grad_norm_error": abs(grad_norm / expected.grad_norm - 1),
        "update_error": ((weights - expected.after).norm() / change.norm()).item(),
        "skipped": skipped,
    }


def _flat(network: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().cpu().double() for parameter in network.parameters()])
