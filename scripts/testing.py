"""Training steps on images in memory, for gpu.py and tests to time: ours, PyTorch's and timm's.

python scripts/testing.py "TOTAL_BATCH_SIZE=64" "TOTAL_BATCH_SIZE=64 EMA=0.999"
"""

import math
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.models import VisionTransformer
from timm.optim import create_optimizer_v2
from torch import nn
from torch.optim import Optimizer

from cifar10_benchmark import train as train_cifar10
from common.config.load import load_config
from common.config.plan import DataSummary
from common.engine.compiler import compile_model
from common.errors import run_command
from common.hardware import is_fast
from common.model.build import build_model, timm_arguments
from common.optim.build import build_optimizer
from common.testing.commands import in_words

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BFLOAT16 = DEVICE == "cuda" or is_fast("bfloat16")  # False: all is measured in float32


@dataclass
class Work:
    """What a variant does, as a data loader of ``items`` in turn, a step each.

    It has ``warm_up`` steps, ``steps`` that are timed, and one more with what a loop does at its
    end. Then ``seconds`` is the mean of the timed ones, by ``clock``.
    """

    settings: tuple[str, ...]
    steps: int
    warm_up: int
    compiled: bool | str = False  # a value of the config's COMPILE
    items: Iterable[Any] = (None,)
    seconds: float = 0
    clock: Callable[[], float] = time.perf_counter
    accumulation: int = 1  # items of a step
    config: dict[str, Any] = field(default_factory=dict)

    def fill(self) -> dict[str, Any]:
        """Return the config, and have batches of random images and labels as items."""
        self.config = config = load_config("vit_lite_vanilla", self.settings)
        size = min(config["TOTAL_BATCH_SIZE"], config["MICRO_BATCH_SIZE"] or math.inf)
        self.accumulation = config["TOTAL_BATCH_SIZE"] // size
        side = config["MODEL"]["image_size"]
        # Drawn on the CPU: all devices get the same.
        images = torch.randn(4, size, 3, side, side).to(DEVICE)
        labels = torch.randint(config["MODEL"]["num_classes"], (4, size)).to(DEVICE)
        self.items = list(zip(images, labels, strict=True))
        return config

    def __len__(self) -> int:
        return (self.warm_up + self.steps + 1) * self.accumulation

    def __iter__(self) -> Iterator[Any]:
        started = 0.0
        ends = [count * self.accumulation for count in (self.warm_up, self.warm_up + self.steps)]
        for number, item in enumerate(islice(cycle(self.items), len(self))):
            if number in ends:
                if DEVICE == "cuda":
                    torch.cuda.synchronize()  # the steps may still be in its queue
                now = self.clock()
                self.seconds = (now - started) / self.steps
                started = now
            yield item

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, _: object) -> None: ...


def bare(work: Work) -> None:
    """Train our model as in PyTorch's tutorial."""
    config = work.fill()
    model = build_model(**config["MODEL"]).to(DEVICE)
    optimizer = build_optimizer(
        model, learning_rate=config["LEARNING_RATE"], weight_decay=config["WEIGHT_DECAY"]
    )
    # 0.1 is the recipe's LABEL_SMOOTHING, as in `ours`.
    train(model, optimizer, nn.CrossEntropyLoss(label_smoothing=0.1), work)


def timm(work: Work) -> None:
    """Train timm's model with its loss and optimizer, as its train.py does with --amp."""
    config = work.fill()
    model = VisionTransformer(**timm_arguments(**config["MODEL"])).to(DEVICE)
    optimizer = create_optimizer_v2(model, "adamw", config["LEARNING_RATE"], config["WEIGHT_DECAY"])
    train(model, optimizer, LabelSmoothingCrossEntropy(0.1), work)


def train(model: nn.Module, optimizer: Optimizer, criterion: nn.Module, work: Work) -> None:
    if work.compiled:
        compile_model(model, work.compiled)
    for images, labels in work:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=BFLOAT16):
            loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()


def ours(work: Work) -> None:
    """Train by cifar10_benchmark/train.py, with all its hooks, without an evaluation."""
    config = work.fill()
    steps = len(work) // work.accumulation
    # one epoch
    data = DataSummary(config["TOTAL_BATCH_SIZE"] * steps, 10_000, 10, fingerprint="none")
    instead: dict[str, Any] = dict(
        TASK=replace(train_cifar10.TASK, describe=lambda _: data),
        build_train_loader=lambda *_, **__: work,
        build_eval_loader=lambda *_, **__: None,
        BatchAugment=lambda **_: None,  # the recipe augments no batch
    )
    precision = "fp16=dict(mode=AMP_TYPE.TORCH,dtype='bfloat16')" if BFLOAT16 else "fp16=None"
    with TemporaryDirectory() as folder, mock.patch.multiple(train_cifar10, **instead):
        Path(folder, "unread").touch()  # the folder of the data must not be empty
        settings = [*work.settings, precision, f"COMPILE={work.compiled!r}", f"DATA.root={folder}"]
        settings.append(f"MAX_STEPS={steps}")
        words = ["--config", "vit_lite_vanilla", "--output", f"{folder}/run", *in_words(*settings)]
        train_cifar10.main(words)


def main(argv: list[str] | None = None) -> None:
    """Print the CPU time of a step of each variant, and the median of its ratios to the first."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", help="KEY=VALUE of a variant, between spaces")
    parser.add_argument("--rounds", type=int, default=5, help="of all variants in turn")
    args = parser.parse_args(argv)
    seconds: dict[str, list[float]] = {variant: [] for variant in args.variants}
    for _ in range(args.rounds):
        for variant, times in seconds.items():
            work = Work(tuple(variant.split()), steps=60, warm_up=10, clock=time.process_time)
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                ours(work)
            times.append(work.seconds)
    first = seconds[args.variants[0]]
    for variant, times in seconds.items():
        ratio = median(one / other for one, other in zip(times, first, strict=True))
        print(f"{1e3 * median(times):7.2f} ms  x {ratio:.3f}  {variant}")


if __name__ == "__main__":
    run_command(main)
