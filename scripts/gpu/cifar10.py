"""Piece: CIFAR-10 from the first step to the last."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from cifar10_benchmark.train import main as train
from common.testing.photographs import write_photographs
from common.tools.harness import NotRunError, Row, UnfinishedError
from common.tools.report import FinishedRun, load_run
from gpu.job import Job

CONFIG = "vit_lite_vanilla"
SETTINGS = ("EVAL_EVERY=10", "CHECKPOINT_EVERY='1 min'")
TINY = ("NUM_EPOCHS=2", "WARMUP_EPOCHS=1", "TOTAL_BATCH_SIZE=16", "MODEL.width=32", "MODEL.depth=1", "LOG.every=1")
TO_STOP = 30  # seconds for a run to save and end


def cifar10(job: Job) -> Iterator[Row]:
    """Train ViT-Lite-7/4 on CIFAR-10 for the recipe's 200 epochs in bfloat16; saves and stops near the limit."""
    if job.tiny:
        data = _write_tiny(job.folder / "data")
    elif (data := job.data.get("cifar")) is None:
        raise NotRunError("no data: --cifar names CIFAR-10's folder")
    output = job.folder / "run"
    precision = "bfloat16" if job.has_bfloat16 else "float32"
    amp = ["fp16.mode=AMP_TYPE.TORCH", "fp16.dtype='bfloat16'"] if job.has_bfloat16 else ["fp16=None"]
    settings = [*SETTINGS, *amp, *(TINY if job.tiny else ()), f"DATA.root={data}"]
    words = [word for setting in settings for word in ("--set", setting)]
    code = _train_until(["--config", CONFIG, "--output", str(output), *words], job.seconds_left - TO_STOP)
    row = summarise(load_run(output, CONFIG))
    if code == 0:
        yield row | {"precision": precision}
    elif code == 128 + signal.SIGTERM:
        raise UnfinishedError(f"step {row['step']} of {row['of']}; the next call resumes it")
    else:
        yield row | {"wrong": f"training ended with exit code {code}"}


def _write_tiny(folder: Path) -> Path:
    if not (folder / "test").exists():
        for split, images in (("train", 40), ("test", 8)):
            write_photographs(folder / split, ("cat", "dog"), 2 * images, 32, 32)
    return folder


def _train_until(arguments: list[str], seconds: float) -> int:
    """Train like the command, with a SIGTERM after ``seconds``; return the exit code."""
    timer = threading.Timer(max(0.0, seconds), os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        train(arguments)
    except SystemExit as end:
        return end.code
    finally:
        timer.cancel()
    return 0


def summarise(run: FinishedRun) -> Row:
    """Return the result of a run; ``seconds`` covers all its starts."""
    top1, trained = [record["top1"] for record in run.of_kind("eval")], run.of_kind("train")
    return {
        "epochs": run.records[-1]["epoch"],
        "step": run.records[-1]["step"],
        "of": run.about["plan"]["last_step"],
        "top1": top1[-1] if top1 else None,
        "best_top1": max(top1, default=None),
        "seconds": run.seconds,
        "starts": len(run.starts),
        "images_per_s": trained[-1]["samples_per_s"],
        "mfu": trained[-1]["mfu"],
        "memory_gb": trained[-1]["peak_memory_gb"],
        "evaluations": len(top1),
    }
