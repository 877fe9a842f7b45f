"""Measure the steps of one mode of mixed precision, a few at a time."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from caltech101_amp import dataloader
from common.hardware import rank_cores
from common.run.comparison import MeasuredRun
from common.tools.harness import Rounds

PHASES = ("data", "forward", "backward", "optimizer")
WARM_UP = 2  # untimed steps before each round


def serve_rounds(config: str, settings: list[str], output: Path, steps: int, rounds: Rounds) -> None:
    """Train one mode for ``steps`` steps per round, and report seconds per step and phase, and peak memory.

    Each mode has its own process to separate the memory peaks; between rounds it holds only weights and optimizer
    state.
    """
    run = MeasuredRun(config, settings, output, dataloader)
    run.engine.train()
    batches = _repeat(run.loader)
    workers = run.config["DATA"]["workers"]
    read_ahead = 2 * (rank_cores() if workers is None else workers)
    for measurements in rounds:
        if run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(read_ahead):  # prefetched since the last round
            next(batches)
        for _ in range(WARM_UP):
            _step(run, batches)
        marks = [_now(), *(mark for _ in range(steps) for mark in _step(run, batches))]
        phases = np.diff(marks).reshape(steps, len(PHASES)).mean(0).tolist()
        measurements |= dict(zip(PHASES, phases, strict=True)) | {"step": sum(phases)}
        measurements |= {"batch": run.plan.total_batch, "memory": run.peak_memory()}
        if run.device.type == "cuda":
            torch.cuda.empty_cache()  # leave memory for the other modes


def _step(run: MeasuredRun, batches: Iterator[tuple[Tensor, Tensor]]) -> list[float]:
    """Take an optimizer step; return the time at the end of each phase."""
    images, labels = next(batches)
    marks = [_now()]
    loss = run.loss(run.engine(images), labels)
    marks.append(_now())
    run.engine.backward(loss)
    marks.append(_now())
    run.engine.step()
    run.engine.zero_grad()
    return [*marks, _now()]


def _repeat(loader: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def _now() -> float:
    """Return the time, on a GPU when its work is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
