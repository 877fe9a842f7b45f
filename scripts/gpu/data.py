"""Piece: CIFAR-10's batches, alone and beside training."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from cifar10_benchmark.augment import UNIFORMS_PER_SAMPLE, Augment
from cifar10_benchmark.dataloader import READ_AHEAD, MemoryReader
from cifar10_benchmark.dataset import Images
from common.config.load import load_config
from common.data.loader import Loader
from common.data.micro_batches import TrainSampler
from common.tools.harness import Row
from gpu.job import PRECISIONS, TINY, Job, open_engine, train_step


def cuda_prefetch(job: Job) -> Iterator[Row]:
    """Time steps of ViT-Lite-7/4 at batch 512 alone, CIFAR-10's augmented batches alone, and both as in training."""
    recipe = load_config("vit_lite_vanilla")
    model, batch = (TINY, 4) if job.tiny else (recipe["MODEL"], recipe["TOTAL_BATCH_SIZE"])
    loader = open_cifar(recipe["DATA"], batch, model["image_size"], job.device)
    yield from measure_overlap(job, model, repeat(loader), READ_AHEAD)


def measure_overlap(job: Job, model: Mapping[str, Any], batches: Iterator[Any], at_once: int) -> Iterator[Row]:
    """Time a training step, a batch (of ``at_once`` that are made together), and both."""
    with open_engine(model, PRECISIONS["bf16" if job.has_bfloat16 else "fp32"]) as engine:
        ready = next(batches)
        times = {}
        for name, work in {
            "step": lambda: train_step(engine, ready),
            "batch": lambda: next(batches),
            "both": lambda: train_step(engine, next(batches)),
        }.items():
            times[name] = job.milliseconds(lambda work=work: [work() for _ in range(at_once)])["ms"] / at_once
            yield {"work": name, "ms": times[name]}
    hidden = (times["step"] + times["batch"] - times["both"]) / times["batch"]
    yield {"work": "share of the batch's time hidden by the step", "share": hidden}


def open_cifar(data: Mapping[str, Any], batch: int, side: int, device: torch.device) -> Loader:
    """Return the loader of CIFAR-10's recipe, whose DATA is ``data``, over 10,000 random images on the device."""
    random = np.random.default_rng(0)
    images = Images(random.integers(0, 256, (10_000, 3, side, side), np.uint8), random.integers(0, 10, 10_000))
    sampler = TrainSampler(10_000, batch, batch, dp_rank=0, dp_size=1, seed=0, uniforms=UNIFORMS_PER_SAMPLE)
    augment = Augment(data["crop_padding"], data["flip"], data["autoaugment"])
    return Loader(sampler, MemoryReader(images, augment, mean=data["mean"], std=data["std"], device=device))


def repeat(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader
