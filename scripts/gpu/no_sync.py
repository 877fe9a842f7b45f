"""Piece: the host does not wait for the device within training steps."""

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from common.colossal import BaseHook, Trainer
from common.colossal.step_optimizer import CHECK_EVERY
from common.config.batch_plan import Plan
from common.config.load import load_config
from common.metrics.hook import MetricsHook
from common.testing import host_sync
from common.tools.harness import ROOT, Row
from gpu.data import open_cifar
from gpu.job import PRECISIONS, TINY, Job, open_engine

STEPS = CHECK_EVERY - 1  # only then are the counters of skipped updates read
BATCH, CLASSES = 8, 10


def no_sync(job: Job) -> Iterator[Row]:
    """Train with the Trainer and its metrics; the host must not wait for the device, or for other ranks, in a step."""
    model = TINY | {"dropout": 0.1, "drop_path": 0.1, "num_classes": CLASSES}
    batches = [job.random_batch(model, BATCH)] * STEPS
    loader = open_cifar(load_config("vit_lite_vanilla")["DATA"], BATCH, model["image_size"], job.device)
    cases = [("on the device", optimizer, mode, batches) for optimizer, mode in product(("adamw", "lamb"), PRECISIONS)]
    cases.append(("CIFAR-10's, augmented", "adamw", "bf16" if job.has_bfloat16 else "fp32", loader))
    for data, optimizer, mode, source in cases:
        row = {"batches": data, "optimizer": optimizer, "mode": mode} | job.lacks(mode)
        if "not_run" not in row:
            hook = ForbidWaiting(job.device)
            where = _train(job, model, PRECISIONS[mode], optimizer, source, hook)
            row |= {"steps": hook.steps} | ({"wrong": f"the host waits at {where}"} if where else {})
        yield row


class ForbidWaiting(BaseHook):
    """Forbid waiting from before each iteration until after its metrics, except in the first two, which set up."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(priority=100)
        self.device, self.stack, self.steps = device, ExitStack(), 0

    def before_train_iter(self, trainer: Trainer) -> None:
        if trainer.step >= 2:
            self.stack.enter_context(host_sync.forbid_waiting(self.device))
            self.stack.enter_context(forbid_distributed_waiting())

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        self.stack.close()
        self.steps += trainer.step > 2


@contextmanager
def forbid_distributed_waiting() -> Iterator[None]:
    """Raise RuntimeError where this process waits in torch.distributed, which PyTorch's own debug mode does not see."""

    def wait(*args: Any, **options: Any) -> None:
        raise RuntimeError("torch.distributed would wait for other ranks")

    with patch.object(dist.Work, "wait", wait), patch.object(dist, "barrier", wait):
        yield


def _train(
    job: Job,
    model: Mapping[str, Any],
    config: Mapping[str, Any],
    optimizer: str,
    batches: Iterable[Any],
    hook: ForbidWaiting,
) -> str | None:
    """Train for `STEPS` steps; return where the host waited first, or None."""
    plan = Plan(1, 1, 1, BATCH, 1, BATCH, 1, STEPS + 1, 0, STEPS + 1, STEPS + 1)  # longer, so that nothing is recorded
    with open_engine(model, config, optimizer) as engine, hook.stack:
        engine.optimizer.counter.every = CHECK_EVERY  # as on a GPU
        metrics = MetricsHook(
            plan, job.folder, every=1000, tensorboard=False, trackers=[], is_main=True, peak_samples_per_s=1.0
        )
        try:
            Trainer(engine).fit(batches, 1, STEPS, hooks=[metrics, hook])
        except RuntimeError as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in frames if _is_ours(Path(frame.filename))]
            return f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {str(error).splitlines()[0]}"
    return None


def _is_ours(file: Path) -> bool:
    installed = "site-packages" in file.parts  # of a .venv in the project's folder
    return file.is_relative_to(ROOT) and not installed and file not in (Path(host_sync.__file__), Path(__file__))
