"""Shared by the pieces: size and device, engines set up as in a train.py, and timing."""

import gc
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.colossal import AMP_TYPE, Engine, initialize, launch, shutdown
from common.hardware import is_fast
from common.model.vit import build_model
from common.optim.build import build_optimizer
from common.tools.harness import Row

WARM_UP, ROUNDS, ROUND = 5.0, 5, 0.5  # on a GPU: seconds under load before it is timed; rounds, and their seconds
WEIGHT_DECAY = 0.1
VIT_S16 = dict(image_size=224, patch_size=16, width=384, depth=12, heads=6, num_classes=1000)
VIT_B16 = dict(image_size=224, patch_size=16, width=768, depth=12, heads=12, num_classes=1000)
TINY = dict(image_size=32, patch_size=16, width=32, depth=2, heads=2, num_classes=10)


def amp(mode: str, dtype: str, **options: Any) -> dict[str, Any]:
    """Return the config's ``fp16`` section."""
    return {"fp16": {"mode": AMP_TYPE[mode], "dtype": dtype, **options}}


PRECISIONS = {
    "fp32": {"TF32": False},
    "tf32": {"TF32": True},
    "bf16": amp("TORCH", "bfloat16"),
    "fp16": amp("TORCH", "float16"),
}
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


@dataclass
class Job:
    """Options of a piece.

    Attributes:
        tiny: only check that everything runs.
        folder: the piece's folder, kept until the piece is complete.
        seconds: time limit.
        data: folders of data sets, by name.
    """

    tiny: bool
    folder: Path
    seconds: float
    data: dict[str, Path] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def has_bfloat16(self) -> bool:
        return self.on_gpu or is_fast("bfloat16")

    def lacks(self, mode: str) -> Row:
        """Return a row with the reason why ``mode``, named after its number format, cannot run here, or {}."""
        return {"not_run": "this CPU has no bfloat16"} if mode.endswith("bf16") and not self.has_bfloat16 else {}

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def new_folder(self, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / name).mkdir(parents=True)
        return self.folder / name

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def time(self, work: Callable[[], object]) -> list[float]:
        """Return the seconds of one ``work`` in each of `ROUNDS` rounds, after a warm-up."""
        seconds, until = 0.0, time.perf_counter() + (WARM_UP if self.on_gpu and not self.tiny else 0.0)
        while not seconds or time.perf_counter() < until:
            seconds = self._time(work, 1)
        repeats = math.ceil(ROUND / seconds) if self.on_gpu and not self.tiny else 1
        return [self._time(work, repeats) for _ in range(ROUNDS)]

    def _time(self, work: Callable[[], object], repeats: int) -> float:
        self.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        self.synchronize()
        return (time.perf_counter() - started) / repeats

    def milliseconds(self, work: Callable[[], object]) -> Row:
        return {"ms": 1e3 * statistics.median(self.time(work)), "n": ROUNDS}

    def peak_memory(self) -> Row:
        """Return the GPU's peak memory since the last reset; {} on a CPU."""
        if not self.on_gpu:
            return {}
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"memory_gb": allocated / 1e9, "reserved_gb": reserved / 1e9}

    def random_batch(self, model: Mapping[str, Any], batch: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(1)
        images = torch.randn(batch, 3, model["image_size"], model["image_size"], generator=random)
        return images.to(self.device), torch.randint(model["num_classes"], (batch,), generator=random).to(self.device)


@contextmanager
def open_engine(
    model: Mapping[str, Any], config: Mapping[str, Any], optimizer: str = "adamw", learning_rate: float = 1e-3
) -> Iterator[Engine]:
    """Yield an engine for training; the memory of an earlier one is freed."""
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


def train_step(engine: Engine, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Take an optimizer step, every micro-batch with the same samples; return the loss, on the device."""
    images, labels = batch
    for _ in range(engine.optimizer.accumulation):
        engine.zero_grad()
        loss = engine.criterion(engine(images), labels)
        engine.backward(loss)
        engine.step()
    return loss.detach()
