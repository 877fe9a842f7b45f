"""Training loops to compare with ours, as each library's documentation says, around the same model, data and precision.

Each is called with a `Job` and its `Rounds`.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from job import Batch, Job, RoundBatches, build_ours
from torch import Tensor, nn

from common.hardware import is_fast
from common.model.vit import build_model
from common.tools.harness import Rounds

PRECISION = "bfloat16" if is_fast("bfloat16") else "float32"
autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=PRECISION == "bfloat16")


def train_quietly(loop: Callable[[Job, Rounds], None], job: Job, rounds: Rounds) -> None:
    """Run the loop on one thread, with what it prints thrown away: its progress bar too, which is still drawn."""
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        loop(job, rounds)


def bare(job: Job, rounds: Rounds) -> None:
    """Train with what PyTorch's tutorial has, and nothing else."""
    model, optimizer, criterion, schedule = build_ours(job)
    model.train()
    for images, labels in RoundBatches(job, rounds):
        optimizer.zero_grad()
        with autocast():
            output = model(images)
        criterion(output.float(), labels).backward()
        optimizer.step()
        schedule.step()


def timm_loop(model: nn.Module, optimizer: torch.optim.Optimizer, job: Job, rounds: Rounds) -> None:
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
    for number, (images, labels) in enumerate(RoundBatches(job, rounds)):
        data_time.update(time.time() - ended)
        with autocast():
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


def timm(job: Job, rounds: Rounds) -> None:
    """Train timm's own model with its own optimizer, as `train.py --opt adamw --amp --amp-dtype bfloat16` does."""
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
    timm_loop(model, optimizer, job, rounds)


def timm_around_ours(job: Job, rounds: Rounds) -> None:
    """Train our model and optimizer in timm's loop."""
    model, optimizer, *_ = build_ours(job)
    timm_loop(model, optimizer, job, rounds)


def accelerate(job: Job, rounds: Rounds) -> None:
    from accelerate import Accelerator
    from tqdm import tqdm

    accelerator = Accelerator(mixed_precision="bf16" if PRECISION == "bfloat16" else "no", cpu=True)
    model, optimizer, criterion, schedule = build_ours(job)
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

    precision = "bf16-mixed" if PRECISION == "bfloat16" else "32-true"
    trainer = LightningTrainer(
        accelerator="cpu", precision=precision, max_epochs=1, logger=False, enable_checkpointing=False
    )
    trainer.fit(Module(), RoundBatches(job, rounds))


def forward_alone(job: Job, rounds: Rounds) -> None:
    """Compute the logits of ``job.steps`` batches a round."""
    model, batches = build_model(**job.config["MODEL"]), cycle(job.batches())
    model.eval()
    for _ in rounds:
        for images, _labels in islice(batches, job.steps):
            with torch.no_grad(), autocast():
                model(images).float()
