"""Engines of the project's own, set up as a train.py does, and the time and memory that their steps take."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from common.colossal import AMP_TYPE, Engine, initialize, launch, shutdown
from common.model.flops import peak_images_per_s
from common.model.vit import build_model
from common.optim.build import build_optimizer
from common.tools.harness import Row
from gpu.job import Job

ROUNDS = 5
WEIGHT_DECAY = 0.1
VIT_S16 = dict(image_size=224, patch_size=16, width=384, depth=12, heads=6, num_classes=1000)
VIT_B16 = dict(image_size=224, patch_size=16, width=768, depth=12, heads=12, num_classes=1000)
TINY = dict(image_size=32, patch_size=16, width=32, depth=2, heads=2, num_classes=10)


def amp(mode: str, dtype: str, **options: Any) -> dict[str, Any]:
    """Return the part of a config that asks for mixed precision."""
    return {"fp16": {"mode": AMP_TYPE[mode], "dtype": dtype, **options}}


PRECISIONS = {"fp32": {}, "tf32": {"TF32": True}, "bf16": amp("TORCH", "bfloat16"), "fp16": amp("TORCH", "float16")}
MODES = {
    "fp32": PRECISIONS["fp32"],
    "tf32": PRECISIONS["tf32"],
    "TORCH bf16": PRECISIONS["bf16"],
    "TORCH fp16": PRECISIONS["fp16"],
    "NAIVE bf16": amp("NAIVE", "bfloat16"),
    "NAIVE fp16": amp("NAIVE", "float16"),
    "APEX O1 fp16": amp("APEX", "float16", opt_level="O1"),
    "APEX O2 fp16": amp("APEX", "float16", opt_level="O2"),
}


@contextmanager
def open_engine(
    model: Mapping[str, Any], config: Mapping[str, Any], optimizer: str = "adamw", learning_rate: float = 1e-3
) -> Iterator[Engine]:
    """Yield an engine for training; nothing of an earlier one is left on the device."""
    on_gpu = torch.cuda.is_available()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    launch({"clip_grad_norm": 1.0, **config}, 0, 1, "", 0, backend="nccl" if on_gpu else "gloo", verbose=False)
    try:
        torch.manual_seed(0)
        network = build_model(**model)
        step = build_optimizer(network, optimizer, learning_rate=learning_rate, weight_decay=WEIGHT_DECAY)
        engine, *_ = initialize(network, step, nn.CrossEntropyLoss())
        engine.train()
        yield engine
    finally:
        shutdown()


def random_batch(job: Job, model: Mapping[str, Any], batch: int) -> tuple[Tensor, Tensor]:
    """Return images and labels on the device."""
    random = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, model["image_size"], model["image_size"], generator=random)
    return images.to(job.device), torch.randint(model["num_classes"], (batch,), generator=random).to(job.device)


def train_step(engine: Engine, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Take an optimizer step, every micro-batch of it with the same samples; return the loss, on the device."""
    images, labels = batch
    for _ in range(engine.optimizer.accumulation):
        engine.zero_grad()
        loss = engine.criterion(engine(images), labels)
        engine.backward(loss)
        engine.step()
    return loss.detach()


def measure_steps(job: Job, model: Mapping[str, Any], config: Mapping[str, Any], batch: int, accumulation: int) -> Row:
    """Return images/s (median and quartiles of rounds), MFU, peak memory and the seconds of the first step."""
    with open_engine(model, {**config, "gradient_accumulation": accumulation}) as engine:
        if job.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        samples = random_batch(job, model, batch)
        first = time_rounds(job, lambda: train_step(engine, samples), rounds=1, at_least=0)[0]
        seconds = time_rounds(job, lambda: train_step(engine, samples), ROUNDS, at_least=0 if job.tiny else 0.5)
        peak = peak_images_per_s(model, config.get("fp16"), 1, job.device)
    slow, middle, fast = statistics.quantiles([batch * accumulation / value for value in seconds], n=4)
    return {
        "images_per_s": middle,
        "quartiles": [slow, fast],
        "mfu": middle / peak,
        "step_ms": 1e3 * statistics.median(seconds),
        "first_step_s": first,
        "n": ROUNDS,
        **peak_memory(job),
    }


def time_rounds(job: Job, work: Callable[[], object], rounds: int, at_least: float) -> list[float]:
    """Return the seconds of one ``work``, for each round of as many as take ``at_least`` seconds."""
    times, repeats = [], 1
    while len(times) < rounds:
        job.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        job.synchronize()
        seconds = time.perf_counter() - started
        if seconds < at_least:  # a warm-up, that shows how many it takes
            repeats = 1 + int(1.2 * repeats * at_least / seconds)
        else:
            times.append(seconds / repeats)
    return times


def peak_memory(job: Job) -> Row:
    """Return the most GB that the process has had on the GPU since the peak was reset; nothing on a CPU."""
    if not job.on_gpu:
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"memory_gb": allocated / 1e9, "reserved_gb": reserved / 1e9}
