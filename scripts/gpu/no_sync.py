"""Pieces: whether the host waits for the device within training steps."""

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import torch
from bench.loaders import cifar

from common.colossal import BaseHook, Trainer
from common.colossal.step_optimizer import CHECK_EVERY
from common.config.batch_plan import Plan
from common.config.load import load_config
from common.metrics.hook import MetricsHook
from common.testing import host_sync as waiting
from common.tools.harness import ROOT, Row, WrongError
from gpu.engines import PRECISIONS, TINY, open_engine, random_batch
from gpu.job import Job

STEPS = CHECK_EVERY - 1  # it looks at the counters of skipped updates only then
BATCH, CLASSES = 8, 10


def no_sync(job: Job) -> Iterator[Row]:
    """Train with the Trainer and its metrics, and forbid the host to wait for the device in steps without a record."""
    model = TINY | {"dropout": 0.1, "drop_path": 0.1, "num_classes": CLASSES}
    batches = [random_batch(job, model, BATCH)] * STEPS
    loader = cifar(load_config("vit_lite_vanilla")["DATA"], BATCH, model["image_size"], job.device)
    cases = [("on the device", optimizer, mode, batches) for optimizer, mode in product(("adamw", "lamb"), PRECISIONS)]
    waits = 0
    for data, optimizer, mode, source in [
        *cases,
        ("CIFAR-10's, augmented", "adamw", "bf16" if job.has_bfloat16 else "fp32", loader),
    ]:
        row = {"batches": data, "optimizer": optimizer, "mode": mode}
        if not_run := job.lacks(mode):
            yield row | not_run
            continue
        hook = ForbidWaiting(job.device)
        where = _train(job, model, PRECISIONS[mode], optimizer, source, hook)
        waits += where is not None
        yield row | {"steps": hook.steps, "waits": where or "no"}
    if waits:
        raise WrongError(f"the host waits for the device in {waits} cases")


class ForbidWaiting(BaseHook):
    """Forbid waiting from before each iteration until after its metrics, but in the first two, which set up."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(priority=100)
        self.device, self.stack, self.steps = device, ExitStack(), 0

    def before_train_iter(self, trainer: Trainer) -> None:
        if trainer.step >= 2:
            self.stack.enter_context(waiting.forbid_waiting(self.device))

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        self.stack.close()
        self.steps += trainer.step > 2


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
    return file.is_relative_to(ROOT) and not installed and file != Path(waiting.__file__)
