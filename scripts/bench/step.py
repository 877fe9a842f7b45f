"""Compare our training loop with a bare one, timm's, Lightning's and accelerate's.

python scripts/bench/step.py [--rounds 4] [--steps 4] [--set KEY=VALUE ...]

ViT-Lite-7/4 as in configs/vit_lite_vanilla.py, in bfloat16 if the CPU supports it, else in float32, at batch 64 by
default, random images in memory. Each loop runs in its own process; they are interleaved, --steps optimizer
steps per round. Two processes with the same code differ more than the loops do, so all are restarted for each round;
the first round after a start is not counted. `loop alone` is training without restarts on a model so small (the same
number of tensors, width 8, one image) that the loop dominates. `float32 stream` is bare PyTorch with the residual
stream in float32 under autocast, as timm has it. `matrix products` does a step's FLOPs as products of 1024 x 1024
matrices, so its ratio to a loop is the MFU of that loop. Libraries of requirements-bench.txt that are not
installed are skipped.
"""

import argparse
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from common.colossal import Trainer, initialize, shard_model
from common.config.batch_plan import DataSummary
from common.config.load import load_config
from common.config.model_arguments import timm_arguments
from common.errors import run_command
from common.hardware import is_fast
from common.model import vit
from common.model.flops import flops_per_image
from common.model.vit import build_model
from common.optim.build import build_optimizer
from common.optim.lr_schedule import build_lr_scheduler
from common.run.start import start_run
from common.tools.benchmark import run_benchmark
from common.tools.harness import Rounds, Row, in_processes, interleave
from common.tools.result_rows import summarise

CONFIG = "vit_lite_vanilla"
PEERS = {"Lightning": "lightning", "accelerate": "accelerate"}
NO_WORK = ("MODEL.image_size=8", "MODEL.width=8", "MODEL.heads=2", "TOTAL_BATCH_SIZE=1")
IN_MEMORY = 4  # different batches, reused
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Job:
    """Work of each loop: ``rounds`` rounds of ``steps`` steps of the recipe with ``settings``."""

    settings: tuple[str, ...]
    steps: int
    rounds: int
    threads: int = 1

    @property
    def config(self) -> dict[str, Any]:
        return load_config(CONFIG, self.settings)

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def precision(self) -> str:
        return "bfloat16" if self.device == "cuda" or is_fast("bfloat16") else "float32"

    @property
    def total_steps(self) -> int:
        """Steps of all rounds plus one, so that a loop that counts batches does not end within a round."""
        return self.rounds * self.steps + 1

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bfloat16")

    def batches(self) -> list[Batch]:
        """Return random images and labels."""
        config = self.config
        batch, side = config["TOTAL_BATCH_SIZE"], config["MODEL"]["image_size"]
        images = torch.randn(IN_MEMORY, batch, 3, side, side).to(self.device)
        return list(zip(images, torch.randint(10, (IN_MEMORY, batch)).to(self.device), strict=True))

    def build(self) -> tuple[nn.Module, Optimizer, nn.Module, LambdaLR]:
        """Return our model, optimizer, loss and schedule."""
        config = self.config
        model = build_model(**config["MODEL"]).to(self.device)
        optimizer = build_optimizer(model, learning_rate=config["LEARNING_RATE"], weight_decay=config["WEIGHT_DECAY"])
        loss = nn.CrossEntropyLoss(label_smoothing=config["LABEL_SMOOTHING"])
        return model, optimizer, loss, build_lr_scheduler(optimizer, "cosine", self.total_steps, warmup_steps=1)


class RoundBatches:
    """A data loader that yields each round's batches, and waits between the rounds."""

    is_blank = False

    def __init__(self, job: Job, rounds: Rounds) -> None:
        self.job, self.rounds = job, rounds

    def __len__(self) -> int:
        return self.job.total_steps

    def __iter__(self) -> Iterator[Batch]:
        batches = cycle(self.job.batches())
        for measured in self.rounds:
            yield from islice(batches, self.job.steps)
            if self.job.device == "cuda":
                torch.cuda.synchronize()
                measured["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        yield next(batches)

    def state_dict(self) -> dict[str, int]:
        """Return a position, for the checkpoint at the end."""
        return {}

    def defer_errors(self) -> None:
        """Do nothing: no storage is read that could fail."""


# --- the loops --------------------------------------------------------------------------------------------------------


def bare(job: Job, rounds: Rounds) -> None:
    """Train as in PyTorch's tutorial."""
    model, optimizer, criterion, schedule = job.build()
    model.train()
    for images, labels in RoundBatches(job, rounds):
        optimizer.zero_grad()
        with job.autocast():
            output = model(images)
        criterion(output.float(), labels).backward()
        optimizer.step()
        schedule.step()


def float32_stream(job: Job, rounds: Rounds) -> None:
    """Train like `bare`, with cls_token, pos_embed and LayerScale in float32 under autocast."""
    with patch.object(vit, "bfloat16_as", lambda tensor, other: tensor):
        bare(job, rounds)


def matrix_products(job: Job, rounds: Rounds) -> None:
    """Multiply matrices for as many FLOPs as the steps have."""
    matrix = torch.ones(1024, 1024, dtype=getattr(torch, job.precision), device=job.device)
    flops = flops_per_image(job.config["MODEL"]) * job.config["TOTAL_BATCH_SIZE"] * job.steps
    for _ in rounds:
        for _ in range(round(flops / (2 * 1024**3))):
            matrix @ matrix
        if job.device == "cuda":
            torch.cuda.synchronize()


def timm(job: Job, rounds: Rounds, *, own_model: bool = True, compiled: bool = False) -> None:
    """Train like timm's train.py (not in its wheel): meters, schedule, loss, a log line every 50 steps.

    With timm's model and optimizer (`--opt adamw --amp --amp-dtype bfloat16 [--torchcompile]`), or with ours.
    """
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.scheduler import create_scheduler_v2
    from timm.utils import AverageMeter

    log, criterion = logging.getLogger("train"), LabelSmoothingCrossEntropy(job.config["LABEL_SMOOTHING"])
    model, optimizer = build_timm(job.config) if own_model else job.build()[:2]
    model = torch.compile(model.to(job.device)) if compiled else model.to(job.device)
    options = dict(num_epochs=1, warmup_epochs=0, step_on_epochs=False, updates_per_epoch=job.total_steps)
    schedule, _ = create_scheduler_v2(optimizer, **options)
    data_time, step_time, losses = AverageMeter(), AverageMeter(), AverageMeter()
    model.train()
    ended = time.time()
    for number, (images, labels) in enumerate(RoundBatches(job, rounds)):
        data_time.update(time.time() - ended)
        with job.autocast():
            loss = criterion(model(images), labels)
        if job.device == "cpu" or number % 50 == 0:  # on a GPU it reads the loss only for its log
            losses.update(loss.item(), len(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step_time.update(time.time() - ended)
        if number % 50 == 0:
            rate = optimizer.param_groups[0]["lr"]
            log.warning(
                "%d loss %.4g step %.3f data %.3f lr %.3e", number, losses.avg, step_time.avg, data_time.avg, rate
            )
        schedule.step_update(num_updates=number + 1, metric=losses.avg)
        ended = time.time()


def build_timm(config: Mapping[str, Any]) -> tuple[nn.Module, Optimizer]:
    from timm.models import VisionTransformer
    from timm.optim import create_optimizer_v2

    model = VisionTransformer(**timm_arguments(**config["MODEL"]))
    return model, create_optimizer_v2(
        model, opt="adamw", lr=config["LEARNING_RATE"], weight_decay=config["WEIGHT_DECAY"]
    )


def accelerate(job: Job, rounds: Rounds) -> None:
    from accelerate import Accelerator
    from tqdm import tqdm

    mixed = "bf16" if job.precision == "bfloat16" else "no"
    accelerator = Accelerator(mixed_precision=mixed, cpu=job.device == "cpu")
    model, optimizer, criterion, schedule = job.build()
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    model.train()
    for images, labels in tqdm(RoundBatches(job, rounds)):
        optimizer.zero_grad()
        with accelerator.autocast():
            output = model(images)
        accelerator.backward(criterion(output.float(), labels))
        optimizer.step()
        schedule.step()


def lightning(job: Job, rounds: Rounds) -> None:
    """Train a LightningModule that logs its loss, with Lightning's progress bar, without its logger and checkpoints."""
    from lightning import LightningModule
    from lightning import Trainer as LightningTrainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer, self.criterion, self.schedule = job.build()

        def training_step(self, batch: Batch, number: int) -> Tensor:
            images, labels = batch
            loss = self.criterion(self.model(images).float(), labels)
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> dict[str, Any]:
            return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": self.schedule, "interval": "step"}}

    precision = "bf16-mixed" if job.precision == "bfloat16" else "32-true"
    off = dict(devices=1, max_epochs=1, logger=False, enable_checkpointing=False)
    trainer = LightningTrainer(accelerator="cpu" if job.device == "cpu" else "gpu", precision=precision, **off)
    trainer.fit(Module(), RoundBatches(job, rounds))


def ours(job: Job, rounds: Rounds) -> None:
    """Train like cifar10_benchmark/train.py, with all its hooks."""
    with TemporaryDirectory() as folder:
        mixed = ["fp16.mode=AMP_TYPE.TORCH", "fp16.dtype='bfloat16'"]
        precision = mixed if job.precision == "bfloat16" else ["fp16=None"]
        Path(folder, "unread").touch()  # the folder of the data must not be empty
        settings = [*job.settings, *precision, f"DATA.root={folder}", f"MAX_STEPS={job.total_steps}"]
        words = [word for setting in settings for word in ("--set", setting)]
        data = DataSummary(job.config["TOTAL_BATCH_SIZE"] * job.total_steps, 10_000, 10, fingerprint="none")
        run = start_run(["--config", CONFIG, "--output", f"{folder}/run", *words], __doc__, lambda _: data)
        model, optimizer, criterion, schedule = job.build()
        model = shard_model(model)
        hooks = run.build_hooks(model, optimizer)
        engine, loader, *_ = initialize(model, optimizer, criterion, RoundBatches(job, rounds), None, schedule)
        Trainer(engine).fit(loader, 1, job.total_steps, hooks=hooks)


# --- the comparison ---------------------------------------------------------------------------------------------------

Loop = Callable[[Job, Rounds], None]
LOOPS: dict[str, Loop] = {
    "bare": bare,
    "float32 stream": float32_stream,
    "matrix products": matrix_products,
    "ours": ours,
    "timm": timm,
    "timm's loop, our model": partial(timm, own_model=False),
    "Lightning": lightning,
    "accelerate": accelerate,
}


def main(argv: list[str]) -> None:
    steps = dict(type=int, default=4, help="optimizer steps per round (default: 4)")
    threads = dict(type=int, default=1, help="threads of each loop (default: 1)")
    only = dict(nargs="+", choices=LOOPS, metavar="LOOP", help="bare and these loops, and no loop alone")
    settings = dict(action="append", default=[], metavar="KEY=VALUE", help="override a key of the recipe")
    packages = list(PEERS.values())
    options = dict(steps=steps, threads=threads, only=only, set=settings)
    run_benchmark("step", measure, argv, __doc__, rounds=4, packages=packages, **options)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of training, and of the loop alone."""
    rounds, steps = (2, 2) if args.tiny else (args.rounds, args.steps)
    settings = ("TOTAL_BATCH_SIZE=64", *args.set, *(NO_WORK if args.tiny else ()))
    job = Job(settings, steps, 2, args.threads)
    names = {"precision": job.precision, "threads": job.threads}
    loops = {name: loop for name, loop in LOOPS.items() if not args.only or name in ("bare", *args.only)}
    yield from summarise(compare(loops, job, rounds), "bare", steps, part="training", **names)
    if not args.only:
        small = Job((*settings, *NO_WORK), steps if args.tiny else 25 * steps, rounds + 1, args.threads)
        yield from summarise(compare(LOOPS, small), "bare", small.steps, part="loop alone", **names)


def compare(loops: Mapping[str, Loop], job: Job, starts: int = 1) -> dict[str, list[Row] | None]:
    """Return each loop's measurements without the first round after each start; None if not installed."""
    present = [name for name in loops if name not in PEERS or find_spec(PEERS[name])]
    compared: dict[str, list[Row] | None] = {name: [] if name in present else None for name in loops}
    for _ in range(starts):
        with in_processes({name: partial(run_quietly, loops[name], job) for name in present}) as variants:
            for name, measured in interleave(variants, job.rounds).items():
                compared[name] += measured[1:]
        present = present[1:] + present[:1]  # each is the first one once
    return compared


def run_quietly(loop: Loop, job: Job, rounds: Rounds) -> None:
    """Run the loop on its threads, discarding its output."""
    torch.set_num_threads(job.threads)
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        loop(job, rounds)


if __name__ == "__main__":
    run_command(main)
