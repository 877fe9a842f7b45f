"""Pieces: whether batches are made beside the training."""

from collections.abc import Iterator

import loaders

from campaign.engines import PRECISIONS, TINY, open_engine, train_step
from campaign.job import Job, Row
from campaign.parts import milliseconds
from cifar10_benchmark.dataloader import READ_AHEAD
from common.config.load import load_config


def side_stream(job: Job) -> Iterator[Row]:
    """Time steps of ViT-Lite-7/4 at batch 512 alone, CIFAR-10's augmented batches alone, and both as in training."""
    recipe = load_config("vit_lite_vanilla")
    model, batch = (TINY, 4) if job.tiny else (recipe["MODEL"], recipe["TOTAL_BATCH_SIZE"])
    batches = loaders.repeat(loaders.cifar(recipe["DATA"], batch, model["image_size"], job.device))
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
