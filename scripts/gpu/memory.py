"""Pieces: whether memory is what was predicted."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from common.colossal import resolve_parallel
from common.config.load import load_config
from common.estimate.memory import TensorMemory
from common.estimate.step_estimate import estimate_step
from common.tools.harness import Row, WrongError
from gpu.engines import MODES, TINY, VIT_B16, VIT_S16, open_engine, peak_memory, random_batch, train_step
from gpu.job import Job

TOLERANCE = 0.1
CASES = (  # model, batch, mode, optimizer, accumulation
    (VIT_S16, 256, "fp32", "adamw", 1),
    (VIT_B16, 128, "fp32", "adamw", 1),
    (VIT_B16, 128, "TORCH fp16", "adamw", 1),
    (VIT_B16, 128, "TORCH bf16", "lamb", 2),
    (VIT_B16, 128, "NAIVE fp16", "adamw", 1),
    (VIT_B16, 128, "APEX O1 fp16", "adamw", 1),
    (VIT_B16 | {"activation_checkpoint": True}, 256, "TORCH bf16", "lamb", 1),
)
TINY_CASES = (
    (TINY | {"image_size": 96, "width": 96}, 16, "fp32", "adamw", 1),
    (TINY | {"image_size": 96, "width": 96}, 16, "TORCH bf16", "lamb", 2),
)


def memory(job: Job) -> Iterator[Row]:
    """Compare the peak of memory that --dry-run predicts with what steps take."""
    wrong = []
    for model, batch, mode, optimizer, accumulation in TINY_CASES if job.tiny else CASES:
        name = f"width {model['width']}" + ", checkpointed" * model.get("activation_checkpoint", False)
        row = {"model": name, "batch": batch, "mode": mode, "optimizer": optimizer, "accumulation": accumulation}
        if not_run := job.lacks(mode):
            yield row | not_run
            continue
        predicted = (
            estimate_step(_config(model, MODES[mode], optimizer), 1, batch, accumulation, job.device.type).peak / 1e9
        )
        taken = _measure(job, model, MODES[mode], optimizer, batch, accumulation)
        row |= {"predicted_gb": predicted, **taken, "predicted_over_measured": predicted / taken["memory_gb"]}
        # what cuBLAS takes for itself, and is not predicted, is much of so little
        is_judged = not (job.tiny and job.on_gpu)
        if is_judged and abs(row["predicted_over_measured"] - 1) > TOLERANCE:
            wrong.append(f"{row['model']} {mode}")
        yield row
    if wrong:
        raise WrongError(f"not within {TOLERANCE:.0%} of what was measured: {'; '.join(wrong)}")


def _config(model: Mapping[str, Any], precision: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """Return the whole config of what `open_engine` builds."""
    config = load_config("vit_s16_vanilla") | {"fp16": None, "clip_grad_norm": 1.0, **precision}
    config["MODEL"] = config["MODEL"] | {"dropout": 0.0} | model
    config["OPTIMIZER"] = {"name": optimizer}
    config["parallel"] = resolve_parallel(None, 1)
    return config


def _measure(
    job: Job, model: Mapping[str, Any], precision: Mapping[str, Any], optimizer: str, batch: int, accumulation: int
) -> Row:
    """Return the most GB of a training step that is not the first; on a CPU, of tensors."""
    tensors = nullcontext() if job.on_gpu else TensorMemory()
    with tensors, open_engine(model, {**precision, "gradient_accumulation": accumulation}, optimizer) as engine:
        train_step(engine, random_batch(job, model, batch))
        if job.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            tensors.restart_peak()
        train_step(engine, random_batch(job, model, batch))
        job.synchronize()
        return peak_memory(job) or {"memory_gb": tensors.peak / 1e9}
