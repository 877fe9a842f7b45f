"""Train one mode for a few steps at a time, and measure what they take."""

import resource
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from caltech101_amp.dataloader import build_train_loader, describe_data
from common.colossal import initialize, shard_model
from common.data.loader import Loader
from common.errors import UserError
from common.hardware import rank_cores
from common.model.vit import build_model
from common.optim.build import build_optimizer
from common.run.start import start_run
from common.tools.harness import Figures, Rounds

PHASES = ("data", "forward", "backward", "optimizer")
WARM_UP = 2  # steps before each round's


def serve_rounds(config: str, settings: list[str], output: Path, steps: int, rounds: Rounds) -> None:
    """Train one mode for ``steps`` steps a round, and add the figures of `Measured.run_round` to it.

    A process of its own for each mode keeps their peaks of memory apart; between its rounds it only holds its weights
    and the optimizer's state.
    """
    trainer = Measured(config, settings, output)
    for figures in rounds:
        figures |= trainer.run_round(steps)


class Measured:
    """A mode's engine and data, set up as caltech101_amp/train.py does, but for the schedule and evaluation."""

    def __init__(self, name: str, settings: list[str], output: Path) -> None:
        words = [word for setting in settings for word in ("--set", setting)]
        run = start_run(["--config", name, "--output", str(output), *words], __doc__, describe_data)
        assert run is not None
        config, plan = run.about["config"], run.plan
        if plan.accumulation > 1:
            raise UserError(f"gradient_accumulation={plan.accumulation}: the comparison takes a step's samples at once")
        self.device, self.batch = run.device, plan.total_batch
        before = peak_memory(self.device)
        model = shard_model(build_model(**config["MODEL"]))
        optimizer = build_optimizer(
            model, learning_rate=config["LEARNING_RATE"], weight_decay=config["WEIGHT_DECAY"], **config["OPTIMIZER"]
        )
        loader = build_train_loader(
            config["DATA"],
            plan.total_batch,
            plan.micro_batch,
            image_size=config["MODEL"]["image_size"],
            seed=config["SEED"],
            device=run.device,
            **run.data_parallel,
        )
        self.loss = nn.CrossEntropyLoss(label_smoothing=config["LABEL_SMOOTHING"])
        self.engine, *_ = initialize(model, optimizer, self.loss)
        self.engine.train()
        self.batches = _repeat(loader)
        workers = config["DATA"]["workers"]
        self.read_ahead = 2 * (rank_cores() if workers is None else workers)
        self.memory_before = before

    def run_round(self, steps: int) -> Figures:
        """Return seconds of each phase and in all, per step, and the peak of memory in bytes."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(self.read_ahead):  # which the loader has had ready since the last round
            next(self.batches)
        for _ in range(WARM_UP):
            self._step()
        marks = [_now(self.device)]
        for _ in range(steps):
            marks += self._step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = [_between(first, second) for first, second in pairwise(marks)]
        figures = {phase: sum(seconds[number :: len(PHASES)]) / steps for number, phase in enumerate(PHASES)}
        figures |= {"step": sum(seconds) / steps, "batch": self.batch}
        figures["memory"] = peak_memory(self.device) - self.memory_before
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for the other modes
        return figures

    def _step(self) -> list[Any]:
        """Take an optimizer step; return the time at the end of each phase."""
        images, labels = next(self.batches)
        marks = [_now(self.device)]
        loss = self.loss(self.engine(images), labels)
        marks.append(_now(self.device))
        self.engine.backward(loss)
        marks.append(_now(self.device))
        self.engine.step()
        self.engine.zero_grad()
        return [*marks, _now(self.device)]


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has held so far: on its GPU, else in all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _repeat(loader: Loader) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def _now(device: torch.device) -> torch.cuda.Event | float:
    """Return a mark in the device's own time: a GPU reaches it later, and is not waited for."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3
