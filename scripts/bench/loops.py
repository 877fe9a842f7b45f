"""Training loops to compare: ours as train.py runs it, and others around the same model, data, precision and optimiser.

Each is called with a `Job` and its `Turns`, and trains as the library's documentation says. ``batches`` make a turn of
every ``job.steps`` steps.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from cifar10_benchmark.dataloader import build_train_loader
from common.colossal import BaseHook, Trainer, initialize, shard_model
from common.config import load_config
from common.cpu_memory import keep_freed_memory
from common.interleave import Turns
from common.lr_schedule import build_lr_scheduler
from common.model import build_model
from common.optimizer import build_optimizer
from common.plan import DataSummary
from common.run import Run, start_run

CONFIG = "vit_lite_vanilla"
IN_MEMORY = 4  # different batches, used over and over
EVALUATED = 10_000  # images of CIFAR-10's test split
BFLOAT16 = partial(torch.autocast, dtype=torch.bfloat16)
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Job:
    """What all loops do: ``rounds`` times ``steps`` steps of what the recipe and ``settings`` say."""

    settings: tuple[str, ...]
    steps: int
    rounds: int
    data: str | None  # folder of CIFAR-10; None for random images

    @property
    def config(self) -> dict[str, Any]:
        return load_config(CONFIG, self.settings)

    @property
    def total_steps(self) -> int:
        """The steps of all turns, and one more: a loop that counts its batches ends after its last turn has."""
        return self.rounds * self.steps + 1

    def batches(self) -> list[Batch]:
        """Return a few batches of normalised images and labels."""
        config = self.config
        batch, side = config["TOTAL_BATCH_SIZE"], config["MODEL"]["image_size"]
        if self.data:
            place = dict(image_size=side, dp_rank=0, dp_size=1, seed=0, device=torch.device("cpu"))
            loader = build_train_loader(config["DATA"] | {"root": self.data}, batch, batch, **place)
            return list(islice(loader, IN_MEMORY))
        random = torch.Generator().manual_seed(0)
        images = torch.randn(IN_MEMORY, batch, 3, side, side, generator=random)
        return list(zip(images, torch.randint(10, (IN_MEMORY, batch), generator=random), strict=True))


class TurnBatches:
    """A data loader that hands out each turn's batches, and waits between the turns."""

    def __init__(self, job: Job, turns: Turns, figures: Callable[[], dict[str, float]] = dict) -> None:
        self.job, self.turns, self.figures = job, turns, figures

    def __len__(self) -> int:
        return self.job.total_steps

    def __iter__(self) -> Iterator[Batch]:
        batches = cycle(self.job.batches())
        for turn in self.turns:
            yield from islice(batches, self.job.steps)
            turn |= self.figures()
        yield next(batches)

    def state_dict(self) -> dict[str, int]:
        """Return a position, for the checkpoint at the end: nothing goes on from it."""
        return {}


class Batches(list):
    """A list of batches that is asked for a position, as `TurnBatches` is."""

    def state_dict(self) -> dict[str, int]:
        return {}


def train_quietly(loop: Callable[[Job, Turns], None], job: Job, turns: Turns) -> None:
    """Run the loop on one thread, with what it prints thrown away: its progress bar too, which is still drawn.

    Memory is kept between steps as our trainer does: page faults vary from process to process by more than loops do.
    """
    torch.set_num_threads(1)
    if loop is not bare_as_is:
        keep_freed_memory()
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        loop(job, turns)


def build_ours(job: Job) -> tuple[nn.Module, AdamW, nn.Module, LambdaLR]:
    """Return model, optimiser, loss and schedule, the same for every loop but timm's own."""
    config = job.config
    model = build_model(**config["MODEL"])
    optimizer = build_optimizer(model, learning_rate=config["LEARNING_RATE"], weight_decay=config["WEIGHT_DECAY"])
    loss = nn.CrossEntropyLoss(label_smoothing=config["LABEL_SMOOTHING"])
    return model, optimizer, loss, build_lr_scheduler(optimizer, "cosine", job.total_steps, warmup_steps=1)


# --- the loops --------------------------------------------------------------------------------------------------------


def bare(job: Job, turns: Turns) -> None:
    """Train with what PyTorch's tutorial has, and nothing else."""
    model, optimizer, criterion, schedule = build_ours(job)
    model.train()
    for images, labels in TurnBatches(job, turns):
        optimizer.zero_grad()
        with BFLOAT16("cpu"):
            output = model(images)
        criterion(output.float(), labels).backward()
        optimizer.step()
        schedule.step()


def bare_as_is(job: Job, turns: Turns) -> None:
    """Train like `bare`, with memory as the C library handles it by default."""
    bare(job, turns)


def ours(job: Job, turns: Turns) -> None:
    """Train as cifar10_benchmark/train.py does, with all its hooks."""
    with TemporaryDirectory() as folder:
        run = _start(job, Path(folder))
        model, optimizer, criterion, schedule = build_ours(job)
        model = shard_model(model)
        hooks = run.build_hooks(model, optimizer)
        spent = Spent(hooks)
        engine, loader, _, schedule = initialize(
            model, optimizer, criterion, TurnBatches(job, turns, spent.take), None, schedule
        )
        Trainer(engine).fit(loader, 1, job.total_steps, hooks=hooks)


def timm_loop(model: nn.Module, optimizer: torch.optim.Optimizer, job: Job, turns: Turns) -> None:
    """Train as timm's train.py does, which its wheel leaves out: its meters, schedule and loss, a log line every 50."""
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.scheduler import create_scheduler_v2
    from timm.utils import AverageMeter

    config, log = job.config, logging.getLogger("train")
    criterion = LabelSmoothingCrossEntropy(config["LABEL_SMOOTHING"])
    schedule, _ = create_scheduler_v2(
        optimizer, num_epochs=1, warmup_epochs=0, step_on_epochs=False, updates_per_epoch=job.total_steps
    )
    data_time, step_time, losses = AverageMeter(), AverageMeter(), AverageMeter()
    model.train()
    ended = time.time()
    for number, (images, labels) in enumerate(TurnBatches(job, turns)):
        data_time.update(time.time() - ended)
        with BFLOAT16("cpu"):
            loss = criterion(model(images), labels)
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


def timm(job: Job, turns: Turns) -> None:
    """Train timm's own model with its own optimiser, as `train.py --opt adamw --amp --amp-dtype bfloat16` does."""
    from timm import create_model
    from timm.optim import create_optimizer_v2

    config = job.config
    shape = config["MODEL"]
    model = create_model(
        "vit_base_patch16_224",
        img_size=shape["image_size"],
        patch_size=shape["patch_size"],
        embed_dim=shape["width"],
        depth=shape["depth"],
        num_heads=shape["heads"],
        mlp_ratio=shape["mlp_ratio"],
        num_classes=shape["num_classes"],
    )
    optimizer = create_optimizer_v2(model, opt="adamw", lr=config["LEARNING_RATE"], weight_decay=config["WEIGHT_DECAY"])
    timm_loop(model, optimizer, job, turns)


def timm_around_ours(job: Job, turns: Turns) -> None:
    """Train our model and optimiser in timm's loop."""
    model, optimizer, *_ = build_ours(job)
    timm_loop(model, optimizer, job, turns)


def accelerate(job: Job, turns: Turns) -> None:
    from accelerate import Accelerator
    from tqdm import tqdm

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model, optimizer, criterion, schedule = build_ours(job)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    model.train()
    for images, labels in tqdm(TurnBatches(job, turns)):
        optimizer.zero_grad()
        with accelerator.autocast():
            output = model(images)
        accelerator.backward(criterion(output.float(), labels))
        optimizer.step()
        schedule.step()


def lightning(job: Job, turns: Turns) -> None:
    """Train a LightningModule that logs its loss, with Lightning's progress bar, without its logger and checkpoints."""
    from lightning import LightningModule
    from lightning import Trainer as LightningTrainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer, self.criterion, self.schedule = build_ours(job)

        def training_step(self, batch: Batch, number: int) -> Tensor:
            images, labels = batch
            loss = self.criterion(self.model(images).float(), labels)
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> dict[str, Any]:
            return {
                "optimizer": self.optimizer,
                "lr_scheduler": {"scheduler": self.schedule, "interval": "step"},
            }

    trainer = LightningTrainer(
        accelerator="cpu", precision="bf16-mixed", max_epochs=1, logger=False, enable_checkpointing=False
    )
    trainer.fit(Module(), TurnBatches(job, turns))


# --- evaluation -------------------------------------------------------------------------------------------------------


def forward_alone(job: Job, turns: Turns) -> None:
    """Compute the logits of ``job.steps`` batches a turn."""
    model, batches = build_model(**job.config["MODEL"]), cycle(job.batches())
    model.eval()
    for _ in turns:
        for images, _labels in islice(batches, job.steps):
            with torch.no_grad(), BFLOAT16("cpu"):
                model(images).float()


def our_evaluation(job: Job, turns: Turns) -> None:
    """Evaluate ``job.steps`` batches a turn as our trainer does."""
    with TemporaryDirectory() as folder:
        run = _start(job, Path(folder))
        model, optimizer, criterion, schedule = build_ours(job)
        hooks = run.build_hooks(model, optimizer)
        spent = Spent(hooks)
        batches = job.batches()
        images, labels = batches[0]
        engine, train, test, schedule = initialize(
            model,
            optimizer,
            criterion,
            Batches([(images[:1], labels[:1])]),
            list(islice(cycle(batches), job.steps)),
            schedule,
        )
        Trainer(engine).fit(train, job.rounds, None, test, hooks=[*hooks, _EvaluationTurns(turns, spent)])


class _EvaluationTurns(BaseHook):
    """Make each evaluation a turn; between them, one step with one image makes an epoch.

    A turn ends before its figures are written, which is the hooks' time: it hands in what that took the last time.
    """

    def __init__(self, turns: Turns, spent: "Spent") -> None:
        super().__init__(priority=-1)  # before the metrics
        self.turns, self.spent = turns, spent

    def before_test(self, trainer: Trainer) -> None:
        self.turns.start()

    def after_test(self, trainer: Trainer) -> None:
        self.turns.stop(self.spent.take())


class Spent:
    """The seconds that hooks' methods take: those of a training step, of an evaluated batch, and at its end.

    By the wall clock: reading the CPU clock takes a system call, which is longer than what it would measure.
    """

    POINTS = ("after_train_iter", "after_test_iter", "after_test")

    def __init__(self, hooks: Iterable[BaseHook]) -> None:
        self.seconds = dict.fromkeys(self.POINTS, 0.0)
        for hook in hooks:
            for point in self.POINTS:
                setattr(hook, point, partial(self._call, point, getattr(hook, point)))

    def _call(self, point: str, method: Callable[..., None], *args: Any) -> None:
        started = time.perf_counter()
        method(*args)
        self.seconds[point] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Return the seconds spent since the last call."""
        spent, self.seconds = self.seconds, dict.fromkeys(self.POINTS, 0.0)
        return spent


def _start(job: Job, folder: Path) -> Run:
    """Start a run of one process over a data set that is as large as the job needs it."""
    (folder / "data").mkdir()
    (folder / "data" / "unread").touch()
    settings = [*job.settings, "fp16.mode=AMP_TYPE.TORCH", f"DATA.root={folder}/data", f"MAX_STEPS={job.total_steps}"]
    arguments = ["--config", CONFIG, "--output", str(folder / "run")]
    samples = job.config["TOTAL_BATCH_SIZE"] * job.total_steps
    words = [word for setting in settings for word in ("--set", setting)]
    return start_run([*arguments, *words], __doc__, lambda _: DataSummary(samples, EVALUATED, 10, fingerprint="none"))
