"""CIFAR-10's augmented batches, for loader.py and the GPU campaign."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from cifar10_benchmark.augment import UNIFORMS_PER_SAMPLE, Augment
from cifar10_benchmark.dataloader import READ_AHEAD, MemoryReader
from cifar10_benchmark.dataset import Images
from common.data.loader import Loader
from common.data.sampling import TrainSampler
from common.tools.harness import Row, interleave, timed


def compare_cifar(batch: int, rounds: int) -> dict[str, list[Row]]:
    """Return the measurements of as many steps of ViT-Lite-7/4, and augmented batches, as are made at once."""
    from step import Job  # not at the top: scripts/gpu imports this module from another folder

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    job = Job((f"TOTAL_BATCH_SIZE={batch}",), steps=1, rounds=1)
    batches = repeat(open_cifar(job.config["DATA"], batch, 32, torch.device("cpu")))
    model, optimizer, criterion, _ = job.build()
    images, labels = next(batches)

    def step() -> None:
        optimizer.zero_grad()
        with job.autocast():
            output = model(images)
        criterion(output.float(), labels).backward()
        optimizer.step()

    for _ in islice(batches, READ_AHEAD - 1):  # the rest of what was made with the first
        pass
    variants = {
        "a training step": lambda: {clock: READ_AHEAD * seconds for clock, seconds in timed(step).items()},
        "its data": lambda: timed(lambda: list(islice(batches, READ_AHEAD))),
    }
    measured = interleave(variants, rounds + 1)
    torch.set_num_threads(threads)
    return {name: rows[1:] for name, rows in measured.items()}


def open_cifar(data: Mapping[str, Any], batch: int, side: int, device: torch.device) -> Loader:
    """Return the loader of CIFAR-10's recipe, whose DATA is ``data``, over 10,000 random images on the device."""
    random = np.random.default_rng(0)
    images = Images(random.integers(0, 256, (10_000, 3, side, side), np.uint8), random.integers(0, 10, 10_000))
    sampler = TrainSampler(10_000, batch, batch, dp_rank=0, dp_size=1, seed=0, uniforms=UNIFORMS_PER_SAMPLE)
    augment = Augment(data["crop_padding"], data["flip"], data["autoaugment"])
    return Loader(sampler, MemoryReader(images, augment, mean=data["mean"], std=data["std"], device=device))


def repeat(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield pass after pass."""
    while True:
        yield from loader
