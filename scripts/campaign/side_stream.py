"""Pieces: whether batches are made beside the training."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from campaign.engines import PRECISIONS, TINY, open_engine, train_step
from campaign.job import Job, Row
from campaign.parts import milliseconds
from cifar10_benchmark.augment import UNIFORMS_PER_SAMPLE, Augment
from cifar10_benchmark.dataloader import READ_AHEAD, MemoryReader
from cifar10_benchmark.dataset import Images
from common.config import load_config
from common.loader import Loader
from common.sampling import TrainSampler


def side_stream(job: Job) -> Iterator[Row]:
    """Time steps of ViT-Lite-7/4 at batch 512 alone, CIFAR-10's augmented batches alone, and both as in training."""
    recipe = load_config("vit_lite_vanilla")
    model, batch = (TINY, 4) if job.tiny else (recipe["MODEL"], recipe["TOTAL_BATCH_SIZE"])
    batches = _repeat(cifar_loader(recipe["DATA"], batch, model["image_size"], job.device))
    with open_engine(model, PRECISIONS["bf16"]) as engine:
        ready = next(batches)
        works = {
            "step": lambda: train_step(engine, ready),
            "batch": lambda: next(batches),
            "both": lambda: train_step(engine, next(batches)),
        }
        times = {}
        for name, work in works.items():
            times[name] = milliseconds(job, lambda work=work: [work() for _ in range(READ_AHEAD)])["ms"] / READ_AHEAD
            yield {"work": name, "ms": times[name]}
    hidden = (times["step"] + times["batch"] - times["both"]) / times["batch"]
    yield {"work": "share of the batch's time that both save", "share": hidden}


def cifar_loader(data: Mapping[str, Any], batch: int, side: int, device: torch.device) -> Loader:
    """Return the loader of CIFAR-10's recipe over 10,000 random images on the device."""
    random = np.random.default_rng(0)
    images = Images(random.integers(0, 256, (10_000, 3, side, side), np.uint8), random.integers(0, 10, 10_000))
    sampler = TrainSampler(10_000, batch, batch, dp_rank=0, dp_size=1, seed=0, uniforms=UNIFORMS_PER_SAMPLE)
    augment = Augment(data["crop_padding"], data["flip"], data["autoaugment"])
    return Loader(sampler, MemoryReader(images, augment, mean=data["mean"], std=data["std"], device=device))


def _repeat(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from batches
