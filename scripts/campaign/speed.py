"""Pieces: how fast models train, and what memory that takes."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from campaign.engines import MODES, PRECISIONS, TINY, VIT_B16, VIT_S16, measure_steps
from campaign.job import Job, Row

ENOUGH = 45  # seconds for one more row


def amp_imagenet(job: Job) -> Iterator[Row]:
    """Train ViT-B/16 at batch 128 on images of ImageNet's shape, in every mode of mixed precision."""
    model, batch = (TINY, 4) if job.tiny else (VIT_B16, 128)
    modes = dict(list(MODES.items())[::3]) if job.tiny else MODES
    for mode, config in modes.items():
        yield {"mode": mode} | _measure(job, model, config, batch)


def vit_s16_eager(job: Job) -> Iterator[Row]:
    """Train ViT-S/16 at batch 256 in every precision, with and without accumulation."""
    yield from _throughput(job, VIT_S16, 256, compiled=False)


def vit_s16_compiled(job: Job) -> Iterator[Row]:
    """Train ViT-S/16 at batch 256 with compiled blocks."""
    yield from _throughput(job, VIT_S16, 256, compiled=True)


def vit_b16_eager(job: Job) -> Iterator[Row]:
    """Train ViT-B/16 at batch 128 in every precision, with and without accumulation."""
    yield from _throughput(job, VIT_B16, 128, compiled=False)


def vit_b16_compiled(job: Job) -> Iterator[Row]:
    """Train ViT-B/16 at batch 128 with compiled blocks."""
    yield from _throughput(job, VIT_B16, 128, compiled=True)


def _throughput(job: Job, model: Mapping[str, Any], batch: int, compiled: bool) -> Iterator[Row]:
    precisions, accumulations = PRECISIONS, (1, 16)
    if job.tiny:
        model, batch, precisions, accumulations = TINY, 4, {"bf16": PRECISIONS["bf16"]}, (1, 2)
    for name, config in precisions.items():
        for accumulation in accumulations:
            names = {"precision": name, "compiled": compiled, "batch": batch, "accumulation": accumulation}
            yield names | _measure(job, model, {**config, "COMPILE": compiled}, batch, accumulation)


def _measure(job: Job, model: Mapping[str, Any], config: Mapping[str, Any], batch: int, accumulation: int = 1) -> Row:
    """Measure the steps, if there is time and memory for them."""
    if job.seconds_left < ENOUGH:
        return {"not_run": "no time was left"}
    try:
        return measure_steps(job, model, config, batch, accumulation)
    except torch.OutOfMemoryError as error:
        return {"not_run": str(error).splitlines()[0]}
