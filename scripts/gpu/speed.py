"""Pieces: how fast models train, and what memory that takes."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from caltech101_amp.compare import CONFIGS, compare, summarise
from caltech101_amp.dataset import CATEGORIES, IMAGES
from common.testing.photographs import write_photographs
from common.tools.harness import Row
from gpu.engines import MODES, PRECISIONS, TINY, VIT_B16, VIT_S16, measure_steps
from gpu.job import Job

ENOUGH = 45  # seconds for one more row
CALTECH_SIZE = 300, 200  # pixels, about
TINY_CALTECH = ("MODEL.image_size=16", "MODEL.patch_size=8", "MODEL.width=32", "MODEL.depth=1", "MODEL.heads=2",
                "MICRO_BATCH_SIZE=8", "DATA.workers=0")  # fmt: skip


def amp_imagenet(job: Job) -> Iterator[Row]:
    """Train ViT-B/16 at batch 128 on images of ImageNet's shape, in every mode of mixed precision."""
    model, batch = (TINY, 4) if job.tiny else (VIT_B16, 128)
    modes = dict(list(MODES.items())[::3]) if job.tiny else MODES
    for mode, config in modes.items():
        yield {"mode": mode} | _measure(job, model, config, batch)


def amp_caltech101(job: Job) -> Iterator[Row]:
    """Train ViT-B/16 at batch 128 in every mode of mixed precision, images decoded from files as training does."""
    data, images = job.data.get("caltech"), "Caltech-101"
    if data is None or job.tiny:
        names = ["accordion", *(f"category {number}" for number in range(1, CATEGORIES))]
        size, count = (20, 16) if job.tiny else CALTECH_SIZE, -(-IMAGES // CATEGORIES) * CATEGORIES
        data, images = write_photographs(job.new_folder("images"), names, count, *size), f"made, {size}"
    settings = [*(TINY_CALTECH if job.tiny else ()), f"DATA.root={data}"]
    steps, rounds, configs = (1, 1, dict(list(CONFIGS.items())[:2])) if job.tiny else (20, 3, CONFIGS)
    figures = compare(settings, job.new_folder("runs"), steps, rounds, configs)
    for mode in figures:
        yield {"images": images} | summarise(mode, figures) | {"steps": steps, "rounds": rounds}


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
    precisions, accumulations = list(PRECISIONS), (1, 16)
    if job.tiny:
        model, batch, precisions, accumulations = TINY, 4, ["bf16" if job.has_bfloat16 else "fp32"], (1, 2)
    for name in precisions:
        for accumulation in accumulations:
            names = {"precision": name, "compiled": compiled, "batch": batch, "accumulation": accumulation}
            yield names | _measure(job, model, {**PRECISIONS[name], "COMPILE": compiled}, batch, accumulation)


def _measure(job: Job, model: Mapping[str, Any], config: Mapping[str, Any], batch: int, accumulation: int = 1) -> Row:
    """Measure the steps, if there is time and memory for them."""
    if job.seconds_left < ENOUGH:
        return {"not_run": "no time was left"}
    try:
        return measure_steps(job, model, config, batch, accumulation)
    except torch.OutOfMemoryError as error:
        return {"not_run": str(error).splitlines()[0]}
