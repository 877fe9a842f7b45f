"""Compare training steps, LAMB and loaders with those of PyTorch, timm and torchvision.

``step``: ViT-Lite-7/4 of configs/vit_lite_vanilla.py at batch 64 on images in memory, in a bare loop, in a loop like
timm's train.py around timm's model, and by our Trainer with all its hooks. ``lamb``: a step over the 152 tensors of
ViT-B/16 in float32. ``loader``: a pass over 1,024 generated JPEGs of 500 x 400 pixels, random crops to 224 x 224.

Every round starts each variant once, in rotating order, each in a process of its own with one CPU thread, whose first
steps are not timed. Ratios are medians of those to the first variant in the same round, with quartiles. "CPU" is the
CPU time of the process and its children.
"""

import io
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

import psutil
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.models import VisionTransformer
from timm.optim import Lamb as TimmLamb
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from cifar10_benchmark.task import TASK
from common.colossal import Trainer
from common.config.load import load_config
from common.config.plan import DataSummary
from common.errors import command_parser, format_table, run_command
from common.hardware import cores, describe_run, is_fast
from common.model.build import build_model, timm_arguments
from common.model.training import build_training
from common.optim.build import build_optimizer
from common.optim.lamb import Lamb
from common.run.start import start_run
from common.testing.photographs import write_photographs
from common.tools.report import result_columns
from imagenet_dali.prepare import main as prepare
from imagenet_dali.task import build_train_loader

SMALL = ("TOTAL_BATCH_SIZE=2", "MODEL.image_size=32", "MODEL.width=8", "MODEL.heads=2", "MODEL.num_classes=10")
SIDE, BATCH = 224, 64  # of the loaders' crops
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BFLOAT16 = DEVICE == "cuda" or is_fast("bfloat16")  # else float32
Times = dict[str, float]


@dataclass(frozen=True)
class Work:
    """What a variant does: ``warm_up`` steps or passes over the images, then ``steps`` that are timed."""

    settings: tuple[str, ...]
    steps: int
    warm_up: int
    folder: Path  # of the loaders' images
    compiled: bool

    @property
    def total_steps(self) -> int:
        """One more than are timed, so that what a loop does at its end is not."""
        return self.warm_up + self.steps + 1

    def config(self, recipe: str = "vit_lite_vanilla") -> dict[str, Any]:
        return load_config(recipe, self.settings)

    def time(self, items: Iterable[Any], times: Times) -> Iterator[Any]:
        """Yield an item a step; after the last timed one, put the mean seconds of a step into ``times``."""
        started: Times = {}
        for number, item in enumerate(islice(cycle(items), self.total_steps)):
            if number in (self.warm_up, self.warm_up + self.steps):
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
                now = {"wall": time.perf_counter(), "cpu": cpu_seconds()}
                times |= {name: (now[name] - begun) / self.steps for name, begun in started.items()}
                started = now
            yield item

    def repeat(self, step: Callable[[], object], times: Times) -> None:
        for _ in self.time([None], times):
            if not times:
                step()


class Batches:
    """A data loader of random images and labels in memory."""

    def __init__(self, work: Work, times: Times) -> None:
        self.work, self.times, config = work, times, work.config()
        size, side = config["TOTAL_BATCH_SIZE"], config["MODEL"]["image_size"]
        images = torch.randn(4, size, 3, side, side).to(DEVICE)
        labels = torch.randint(config["MODEL"]["num_classes"], (4, size)).to(DEVICE)
        self.batches = list(zip(images, labels, strict=True))

    def __len__(self) -> int:
        return self.work.total_steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.work.time(self.batches, self.times)

    def state_dict(self) -> dict[str, int]:
        return {}


def bare(work: Work, times: Times) -> None:
    """Train our model as in PyTorch's tutorial."""
    config = work.config()
    model = build_model(**config["MODEL"]).to(DEVICE)
    optimizer = build_optimizer(model, learning_rate=config["LEARNING_RATE"], weight_decay=config["WEIGHT_DECAY"])
    forward = torch.compile(model) if work.compiled else model
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for images, labels in Batches(work, times):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=BFLOAT16):
            output = forward(images)
        criterion(output.float(), labels).backward()
        optimizer.step()


def timm(work: Work, times: Times) -> None:
    """Train timm's model like its train.py (not in its wheel) with --amp: schedule, meters and losses too."""
    config, criterion, losses = work.config(), LabelSmoothingCrossEntropy(0.1), AverageMeter()
    model = VisionTransformer(**timm_arguments(**config["MODEL"])).to(DEVICE)
    optimizer = create_optimizer_v2(model, "adamw", config["LEARNING_RATE"], config["WEIGHT_DECAY"])
    schedule = CosineLRScheduler(optimizer, t_initial=work.total_steps, t_in_epochs=False)
    forward = torch.compile(model) if work.compiled else model
    for number, (images, labels) in enumerate(Batches(work, times)):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=BFLOAT16):
            loss = criterion(forward(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if DEVICE == "cpu" or number % 50 == 0:  # on a GPU it reads the loss only for its log
            losses.update(loss.item(), len(images))
        schedule.step_update(num_updates=number + 1, metric=losses.avg)


def ours(work: Work, times: Times) -> None:
    """Train like cifar10_benchmark/train.py, with all its hooks."""
    data = DataSummary(64 * work.total_steps, 10_000, 10, fingerprint="none")
    precision = "fp16=dict(mode=AMP_TYPE.TORCH,dtype='bfloat16')" if BFLOAT16 else "fp16=None"
    with TemporaryDirectory() as folder:
        Path(folder, "unread").touch()  # the folder of the data must not be empty
        settings = [*work.settings, precision, f"COMPILE={work.compiled}", f"DATA.root={folder}"]
        words = [word for setting in (*settings, f"MAX_STEPS={work.total_steps}") for word in ("--set", setting)]
        task = replace(TASK, describe=lambda _: data)
        run = start_run(["--config", "vit_lite_vanilla", "--output", f"{folder}/run", *words], None, task)
        assert run is not None
        criterion, loaders = nn.CrossEntropyLoss(label_smoothing=0.1), (Batches(work, times), None)
        built = build_training(work.config(), criterion, loaders=loaders, steps=(work.total_steps, 1))
        hooks = run.build_hooks(built.model, built.optimizer)
        Trainer(built.engine).fit(built.train_loader, 1, work.total_steps, hooks=hooks)


def step_optimizer(build: Callable[..., Optimizer], work: Work, times: Times) -> None:
    """Step the parameters of ViT-B/16, with gradients of a usual size."""
    params = list(build_model(**work.config("vit-b16")["MODEL"]).to(DEVICE).parameters())
    for param in params:
        param.grad = 1e-3 * torch.randn_like(param)
    optimizer = build(params, lr=1e-6, weight_decay=0.1)
    work.repeat(optimizer.step, times)


def torchvision(work: Work, times: Times) -> None:
    """Read like torchvision's ImageNet example."""
    crop = [transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    images = datasets.ImageFolder(work.folder / "images" / "train", transforms.Compose([*crop, normalize]))
    loader = DataLoader(images, BATCH, shuffle=True, drop_last=True, num_workers=cores(), persistent_workers=True)
    work.repeat(lambda: deque(loader, 0), times)


def our_loader(root: str, name: str, work: Work, times: Times) -> None:
    data = work.config("vit-b16")["DATA"] | {"root": str(work.folder / root), "loader": name, "workers": cores()}
    place: dict[str, Any] = dict(image_size=SIDE, dp_rank=0, dp_size=1, seed=0, device=torch.device("cpu"))
    loader = build_train_loader(data, BATCH, BATCH, **place)
    work.repeat(lambda: deque(loader, 0), times)


Variant = Callable[[Work, Times], None]
PARTS: dict[str, dict[str, Variant]] = {
    "step": {"bare PyTorch": bare, "timm": timm, "ours": ours},
    "lamb": {
        "ours": partial(step_optimizer, Lamb),
        "timm's LAMB": partial(step_optimizer, TimmLamb),
        "AdamW, fused": partial(step_optimizer, partial(AdamW, fused=True)),
    },
    "loader": {
        "torchvision": torchvision,
        "ours, DALI": partial(our_loader, "shards", "dali"),
        "ours, torchvision": partial(our_loader, "images", "torchvision"),
    },
}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children."""
    children = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(process.cpu_times()[:2]) for process in children)


def run_variant(variant: Variant, work: Work) -> Times:
    """Run a variant in this process, without its output; return its times."""
    times: Times = {}
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        variant(work, times)
    return times


def compare(variants: dict[str, Variant], work: Work, rounds: int) -> dict[str, list[Times]]:
    """Return the times of every variant in every round."""
    # a new interpreter takes seconds to import torch, but a forked process cannot use a GPU
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    measured: dict[str, list[Times]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in islice(cycle(variants), number, number + len(variants)):
            with ProcessPoolExecutor(1, context) as process:
                measured[name].append(process.submit(run_variant, variants[name], work).result())
    return measured


def summarise(measured: dict[str, list[Times]]) -> list[dict[str, str]]:
    """Return a row for each variant, with its ratios to the first one."""
    rows, first = [], next(iter(measured.values()))
    for name, times in measured.items():
        wall, cpu = (statistics.median(one[clock] for one in times) for clock in ("wall", "cpu"))
        row = {"variant": name, "ms": f"{1e3 * wall:.4g}", "CPU ms": f"{1e3 * cpu:.4g}"}
        for title, clock in (("ratio", "wall"), ("ratio, CPU", "cpu")):
            ratios = [one[clock] / reference[clock] for one, reference in zip(times, first, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            row[title] = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        rows.append(row | {"n": str(len(times))})
    return rows


def main(argv: list[str]) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="step, lamb, loader (default: all)")
    parser.add_argument("--rounds", type=int, default=4, help="starts of each variant (default: 4)")
    parser.add_argument("--compile", action="store_true", help="compile the models")
    parser.add_argument("--tiny", action="store_true", help="so small that it shows only that everything runs")
    args = parser.parse_args(argv)
    rounds, steps, warm_up, count = (1, 1, 1, BATCH) if args.tiny else (args.rounds, 8, 4, 16 * BATCH)
    print("`{command}`, {date}, commit {commit}, {hardware}, {versions}".format(**result_columns(describe_run(argv))))
    with TemporaryDirectory() as folder:
        work = Work(SMALL if args.tiny else ("TOTAL_BATCH_SIZE=64",), steps, warm_up, Path(folder), args.compile)
        for part in args.parts or PARTS:
            if part == "loader":
                for split, number in (("train", count), ("val", 4)):
                    write_photographs(work.folder / "images" / split, "abcd", number, 500, 400)
                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                    prepare([str(work.folder / "images"), str(work.folder / "shards")])
                work = replace(work, steps=1, warm_up=1)  # passes over the images
            rows = summarise(compare(PARTS[part], work, rounds))
            print(f"\n## {part}\n\n{format_table(rows)}", flush=True)


if __name__ == "__main__":
    run_command(main)
