"""Pieces: whether training computes the right numbers."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from common.model.vit import build_model
from common.optim.build import build_optimizer
from common.tools.harness import Row, WrongError
from gpu.engines import MODES, TINY, WEIGHT_DECAY, open_engine, train_step
from gpu.job import Job

MODEL = dict(image_size=64, patch_size=16, width=192, depth=4, heads=3, num_classes=10)
STEPS, LEARNING_RATE = 5, 1e-3
OPTIMIZERS = ("adamw", "lamb", "sgd")  # SGD, because the others hardly see a wrong scale
# The most by which a loss may be off; and, relatively, the last gradient's norm and what the steps have changed of the
# weights (the difference's norm over the change's). By the mode's coarsest number format; some five times what a CPU
# shows, TF32's as float16's, which has as many digits.
TOLERANCES = {"fp32": (1e-5, 1e-3), "tf32": (2e-3, 0.1), "fp16": (2e-3, 0.1), "bf16": (1e-2, 0.2)}
Batch = tuple[Tensor, Tensor]


class Expected(NamedTuple):
    """What the reference comes to: losses, norm of the last gradient, and all weights before and after."""

    losses: list[float]
    grad_norm: float
    before: Tensor
    after: Tensor


def numerics(job: Job) -> Iterator[Row]:
    """Take steps of AdamW, LAMB and SGD in every precision; compare losses and weights with float64 on a CPU."""
    model = TINY if job.tiny else MODEL
    batches = _batches(model, 8 if job.tiny else 32)
    wrong = []
    for optimizer, (mode, config) in product(OPTIMIZERS, MODES.items()):
        row = {"optimizer": optimizer, "mode": mode}
        if not_run := job.lacks(mode):
            yield row | not_run
            continue
        row |= _compare(job, model, optimizer, config, batches, _reference(model, optimizer, batches))
        loss_limit, relative_limit = TOLERANCES[mode.split()[-1]]
        row |= {"loss_tolerance": loss_limit, "relative_tolerance": relative_limit}
        relative_errors = row["update_error"], row["grad_norm_error"]
        is_right = row["loss_error"] <= loss_limit and all(error <= relative_limit for error in relative_errors)
        if not is_right or row["skipped"]:
            wrong.append(f"{optimizer} {mode}")
        yield row
    if wrong:
        raise WrongError(f"beyond the tolerance, or updates skipped: {', '.join(wrong)}")


def _batches(model: Mapping[str, Any], batch: int) -> list[Batch]:
    random = torch.Generator().manual_seed(1)
    images = torch.randn(STEPS, batch, 3, model["image_size"], model["image_size"], generator=random)
    return list(zip(images, torch.randint(model["num_classes"], (STEPS, batch), generator=random), strict=True))


def _reference(model: Mapping[str, Any], optimizer: str, batches: list[Batch]) -> Expected:
    """Train in float64 on a CPU, with a loop of its own."""
    torch.manual_seed(0)
    network = build_model(**model).double()
    step = build_optimizer(network, optimizer, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    before, losses = _flat(network), []
    for images, labels in batches:
        step.zero_grad()
        loss = F.cross_entropy(network(images.double()), labels)
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
    batches: list[Batch],
    expected: Expected,
) -> Row:
    with open_engine(model, config, optimizer, LEARNING_RATE) as engine:
        losses = [train_step(engine, (images.to(job.device), labels.to(job.device))) for images, labels in batches]
        weights, skipped = _flat(engine.model), engine.optimizer.skipped
        grad_norm = engine.optimizer.grad_norm.item()
    change = expected.after - expected.before
    return {
        "loss_error": max(abs(loss.item() - value) for loss, value in zip(losses, expected.losses, strict=True)),
        "grad_norm_error": abs(grad_norm / expected.grad_norm - 1),
        "update_error": ((weights - expected.after).norm() / change.norm()).item(),
        "skipped": skipped,
    }


def _flat(network: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().cpu().double() for parameter in network.parameters()])
