"""Piece: CIFAR-10's batches, alone and beside training."""

from collections.abc import Iterator, Mapping
from typing import Any

from bench.cifar import open_cifar, repeat

from cifar10_benchmark.dataloader import READ_AHEAD
from common.config.load import load_config
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
