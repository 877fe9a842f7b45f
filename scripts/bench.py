"""Compare training steps, LAMB and loaders with those of PyTorch, timm and torchvision.

``step``: ViT-Lite-7/4 of configs/vit_lite_vanilla.py at batch 64 on images in memory, in a bare
loop with our model and with timm's, and by our Trainer with all its hooks. ``lamb``: a step over
the 152 tensors of ViT-B/16 in float32. ``loader``: a pass over 1,024 generated JPEGs of 500 x 400
pixels, random crops to 224 x 224.

Every round starts each variant once, in rotating order, each in a process of its own with one CPU
thread, whose first steps are not timed. Ratios are medians of those to the first variant of a
round, with the least and the greatest.
"""

import multiprocessing
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.models import VisionTransformer
from timm.optim import Lamb as TimmLamb
from timm.optim import create_optimizer_v2
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from cifar10_benchmark.task import TASK
from common.config.load import load_config
from common.config.plan import DataSummary
from common.engine.compiler import compile_model
from common.engine.trainer import Trainer
from common.errors import command_parser, run_command
from common.hardware import cores, describe_run, is_fast
from common.model.build import build_model, timm_arguments
from common.optim.build import build_optimizer
from common.run.start import start_run
from common.testing.commands import in_words
from common.testing.photographs import write_photographs
from common.text import format_table
from common.tools.report import result_columns
from common.training import build_training
from imagenet_dali.prepare import main as prepare
from imagenet_dali.task import build_train_loader

SIDE = 224  # pixels of the loaders' crops
BATCH = 64
ROUNDS = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BFLOAT16 = DEVICE == "cuda" or is_fast("bfloat16")  # False: all is measured in float32


@dataclass
class Work:
    """What a variant does, as a data loader of ``items`` in turn, a step each.

    It has ``warm_up`` steps, ``steps`` that are timed, and one more with what a loop does at its
    end. Then ``seconds`` is the mean of the timed ones.
    """

    settings: tuple[str, ...]
    steps: int
    warm_up: int
    compiled: bool | str = False  # a value of the config's COMPILE
    folder: Path = Path()  # where the loaders' images are
    items: Iterable[Any] = (None,)
    seconds: float = 0

    def config(self, recipe: str = "vit_lite_vanilla") -> dict[str, Any]:
        return load_config(recipe, self.settings)

    def fill(self) -> dict[str, Any]:
        """Return the config, and have batches of random images and labels as items."""
        config = self.config()
        size = config["TOTAL_BATCH_SIZE"]
        side = config["MODEL"]["image_size"]
        # Drawn on the CPU: all devices get the same.
        images = torch.randn(4, size, 3, side, side).to(DEVICE)
        labels = torch.randint(config["MODEL"]["num_classes"], (4, size)).to(DEVICE)
        self.items = list(zip(images, labels, strict=True))
        return config

    def __len__(self) -> int:
        return self.warm_up + self.steps + 1

    def __iter__(self) -> Iterator[Any]:
        started = 0.0
        for number, item in enumerate(islice(cycle(self.items), len(self))):
            if number in (self.warm_up, self.warm_up + self.steps):
                if DEVICE == "cuda":
                    torch.cuda.synchronize()  # the steps may still be in its queue
                now = time.perf_counter()
                self.seconds = (now - started) / self.steps
                started = now
            yield item

    def state_dict(self) -> dict[str, int]:
        return {}


def bare(work: Work) -> None:
    """Train our model as in PyTorch's tutorial."""
    config = work.fill()
    model = build_model(**config["MODEL"]).to(DEVICE)
    optimizer = build_optimizer(
        model, learning_rate=config["LEARNING_RATE"], weight_decay=config["WEIGHT_DECAY"]
    )
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
    """Train like cifar10_benchmark/train.py, with all its hooks."""
    work.fill()
    data = DataSummary(64 * len(work), 10_000, 10, fingerprint="none")
    precision = "fp16=dict(mode=AMP_TYPE.TORCH,dtype='bfloat16')" if BFLOAT16 else "fp16=None"
    with TemporaryDirectory() as folder:
        Path(folder, "unread").touch()  # the folder of the data must not be empty
        settings = [*work.settings, precision, f"COMPILE={work.compiled!r}", f"DATA.root={folder}"]
        settings.append(f"MAX_STEPS={len(work)}")
        words = ["--config", "vit_lite_vanilla", "--output", f"{folder}/run", *in_words(*settings)]
        run = start_run(words, None, replace(TASK, describe=lambda _: data))
        assert run is not None
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        steps = (len(work), 1)
        built = build_training(work.config(), criterion, loaders=(work, None), steps=steps)
        hooks = run.build_hooks(built.model, built.optimizer)
        Trainer(built.engine).fit(built.train_loader, 1, len(work), hooks=hooks)


def of_parameters(build: Callable[..., Optimizer], model: nn.Module) -> Optimizer:
    return build(model.parameters(), lr=1e-3, weight_decay=0.1)


def step_optimizer(
    build: Callable[[nn.Module], Optimizer], work: Work, recipe: str = "vit-b16"
) -> None:
    """Step the parameters of a recipe's model, with gradients of a usual size."""
    model = build_model(**work.config(recipe)["MODEL"]).to(DEVICE)
    for param in model.parameters():
        param.grad = 1e-3 * torch.randn_like(param)
    optimizer = build(model)
    for _ in work:
        optimizer.step()


def torchvision(work: Work) -> None:
    """Read like torchvision's ImageNet example."""
    crop = [
        transforms.RandomResizedCrop(SIDE),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ]
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    images = datasets.ImageFolder(
        work.folder / "images" / "train", transforms.Compose([*crop, normalize])
    )
    loader = DataLoader(
        images, BATCH, shuffle=True, drop_last=True, num_workers=cores(), persistent_workers=True
    )
    for _ in work:
        deque(loader, 0)


def our_loader(work: Work) -> None:
    data = work.config("vit-b16")["DATA"] | {
        "root": str(work.folder / "shards"),
        "loader": "dali",
        "workers": cores(),
    }
    loader = build_train_loader(
        data, BATCH, BATCH, image_size=SIDE, seed=0, device=torch.device("cpu")
    )
    for _ in work:
        deque(loader, 0)


Variant = Callable[[Work], None]
PARTS: dict[str, dict[str, Variant]] = {
    "step": {"bare PyTorch": bare, "timm": timm, "ours": ours},
    "lamb": {
        "ours": partial(step_optimizer, partial(build_optimizer, name="lamb", weight_decay=0.1)),
        "timm's LAMB": partial(step_optimizer, partial(of_parameters, TimmLamb)),
    },
    "loader": {"torchvision": torchvision, "ours, DALI": our_loader},
}


def run_variant(variant: Variant, work: Work) -> float:
    """Run a variant in this process, without its output; return the seconds of a step."""
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        variant(work)
    return work.seconds


def compare(variants: dict[str, Variant], work: Work, rounds: int) -> list[dict[str, str]]:
    """Return a row for each variant, with its ratios to the first one."""
    # A new interpreter takes seconds to import torch, but a forked process cannot use a GPU.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    measured: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in islice(cycle(variants), number, number + len(variants)):
            with ProcessPoolExecutor(1, context) as process:
                measured[name].append(process.submit(run_variant, variants[name], work).result())
    rows = []
    first = next(iter(measured.values()))
    for name, seconds in measured.items():
        ratios = [one / other for one, other in zip(seconds, first, strict=True)]
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        rows.append(
            {"variant": name, "ms": f"{1e3 * statistics.median(seconds):.4g}", "ratio": ratio}
        )
    return rows


def main(argv: list[str]) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("part", choices=PARTS, help="what to compare")
    parser.add_argument("--compile", action="store_true", help="compile the models")
    args = parser.parse_args(argv)
    print(
        "`{command}`, {date}, commit {commit}, {hardware}, {versions}".format(
            **result_columns(describe_run(argv))
        )
    )
    with TemporaryDirectory() as folder:
        work = Work(("TOTAL_BATCH_SIZE=64",), 8, 4, args.compile, Path(folder))
        if args.part == "loader":
            for split, count in (("train", 16 * BATCH), ("val", 4)):
                write_photographs(work.folder / "images" / split, "abcd", count, 500, 400)
            prepare([str(work.folder / "images"), str(work.folder / "shards")])
            work = replace(work, steps=1, warm_up=1)  # passes over the images
        print(format_table(compare(PARTS[args.part], work, ROUNDS)))


if __name__ == "__main__":
    run_command(main)
