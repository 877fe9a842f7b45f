"""Pieces: runs as train.py makes them: one resumed from a checkpoint, and what processes send each other."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from common.checkpoint.model_state import MODEL, OPTIMIZER
from common.checkpoint.save import newest_checkpoint
from common.colossal import launch, shutdown
from common.testing.tiny_task import train, write_images
from common.tools.harness import Row, WrongError
from gpu.job import Job

STEPS, SAVED = 6, 3
MODES = {
    "fp32": (),
    "bf16": ("fp16.mode=AMP_TYPE.TORCH", "fp16.dtype='bfloat16'"),
    "fp16": ("fp16.mode=AMP_TYPE.TORCH", "fp16.dtype='float16'"),
}
TOLERANCE = 1e-3  # on a GPU, whose kernels may add up in another order each time; another dropout makes 6e-3


def resume(job: Job) -> Iterator[Row]:
    """Train six steps, the same again, and three that are saved and resumed; compare weights and AdamW's state."""
    data = write_images(job.new_folder("data"))
    wrong = []
    for mode, settings in list(MODES.items())[:: 2 if job.tiny else 1]:
        folder = job.new_folder(mode)
        runs = {name: folder / name for name in ("once", "again", "resumed")}
        for output, *ends in ((runs["once"], STEPS), (runs["again"], STEPS), (runs["resumed"], SAVED, STEPS)):
            for end in ends:
                _train(data, output, "MODEL.dropout=0.1", f"MAX_STEPS={end}", *settings)
        row = {"mode": mode, "steps": STEPS, "saved_after": SAVED}
        row |= {name: _difference(runs["once"], runs[name]) for name in ("again", "resumed")}
        if not row["resumed"] <= 3 * row["again"] + (TOLERANCE if job.on_gpu else 0):
            wrong.append(mode)
        yield row
    if wrong:
        raise WrongError(f"a resumed run differs: {', '.join(wrong)}")


def _train(data: Path, output: Path, *settings: str) -> None:
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        train(data, output, *settings)


def _difference(one: Path, other: Path) -> float:
    """Return by how much the last checkpoints differ: the norm of the difference over that of the numbers."""
    return max(_relative(*(_numbers(run, file) for run in (one, other))) for file in (MODEL, OPTIMIZER))


def _numbers(run: Path, file: str) -> Tensor:
    tensors = load_file(newest_checkpoint(run / "checkpoints") / file)
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def _relative(numbers: Tensor, others: Tensor) -> float:
    return ((others - numbers).norm() / numbers.norm()).item()


def collectives(job: Job) -> Iterator[Row]:
    """Start the process group that training starts, NCCL's on a GPU, with one process, and all-reduce."""
    backend = "nccl" if job.on_gpu else "gloo"
    started = time.perf_counter()
    launch({}, 0, 1, "", 0, backend=backend, verbose=False)
    try:
        numbers = torch.arange(1 << (10 if job.tiny else 24), dtype=torch.float32, device=job.device)
        expected = numbers.clone()
        dist.all_reduce(numbers)
        job.synchronize()
        first = time.perf_counter() - started
        is_right = torch.equal(numbers, expected)
    finally:
        shutdown()
    version = ".".join(map(str, torch.cuda.nccl.version())) if job.on_gpu else ""
    yield {"backend": backend, "version": version, "first_all_reduce_s": first, "right": is_right}
    if not is_right:
        raise WrongError("the sum over one process is not what that process had")
