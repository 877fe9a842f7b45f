"""Piece: predicted against measured memory."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from common.colossal import resolve_parallel
from common.config.load import load_config
from common.estimate.memory import TensorMemory
from common.estimate.step_estimate import estimate_step
from common.tools.harness import Row
from gpu.job import MODES, TINY, VIT_B16, VIT_S16, Job, open_engine, train_step

TOLERANCE = 0.1
CASES = (  # model, batch, mode, optimizer, accumulation
    (VIT_S16, 256, "fp32", "adamw", 1),
    (VIT_B16, 128, "fp32", "adamw", 1),
    (VIT_B16, 128, "TORCH fp16", "adamw", 1),
    (VIT_B16, 256, "TORCH bf16", "lamb", 2),
    (VIT_B16, 128, "NAIVE fp16", "adamw", 1),
    (VIT_B16, 128, "APEX O1 fp16", "adamw", 1),
    (VIT_B16 | {"activation_checkpoint": True}, 256, "TORCH bf16", "lamb", 1),
)
TINY_CASES = (
    (TINY | {"image_size": 96, "width": 96}, 16, "fp32", "adamw", 1),
    (TINY | {"image_size": 96, "width": 96}, 16, "TORCH bf16", "lamb", 2),
)


def memory(job: Job) -> Iterator[Row]:
    """Compare the peak of memory that --dry-run predicts with that of training steps."""
    for model, batch, mode, optimizer, accumulation in TINY_CASES if job.tiny else CASES:
        name = f"width {model['width']}" + ", checkpointed" * model.get("activation_checkpoint", False)
        row = {"model": name, "batch": batch, "mode": mode, "optimizer": optimizer, "accumulation": accumulation}
        if row | job.lacks(mode) != row:
            yield row | job.lacks(mode)
            continue
        config = _config(model, MODES[mode], optimizer)
        predicted = estimate_step(config, 1, batch, accumulation, job.device.type).peak / 1e9
        taken = _measure(job, model, {**MODES[mode], "gradient_accumulation": accumulation}, optimizer, batch)
        row |= {"predicted_gb": predicted, **taken, "predicted_over_measured": predicted / taken["memory_gb"]}
        # a tiny model takes less than cuBLAS's workspace, which is not predicted
        if not (job.tiny and job.on_gpu) and abs(row["predicted_over_measured"] - 1) > TOLERANCE:
            row["wrong"] = f"{name} {mode}: not within {TOLERANCE:.0%} of what was measured"
        yield row


def _config(model: Mapping[str, Any], precision: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """Return the whole config of what `open_engine` builds."""
    config = load_config("vit_s16_vanilla") | {"fp16": None, "clip_grad_norm": 1.0, **precision}
    config["MODEL"] = config["MODEL"] | {"dropout": 0.0} | model
    return config | {"OPTIMIZER": {"name": optimizer}, "parallel": resolve_parallel(None, 1)}


def _measure(job: Job, model: Mapping[str, Any], config: Mapping[str, Any], optimizer: str, batch: int) -> Row:
    """Return the peak of memory of the second training step; on a CPU, of tensors."""
    tensors = nullcontext() if job.on_gpu else TensorMemory()
    with tensors, open_engine(model, config, optimizer) as engine:
        train_step(engine, job.random_batch(model, batch))
        if job.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            tensors.restart_peak()
        train_step(engine, job.random_batch(model, batch))
        job.synchronize()
        return job.peak_memory() or {"memory_gb": tensors.peak / 1e9}
