"""Pieces: a resumed run, and collectives."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing import start_processes

from common.checkpoint.model_state import MODEL, OPTIMIZER
from common.checkpoint.save import newest_checkpoint
from common.colossal import launch, shutdown
from common.testing.ranks import free_port
from common.testing.tiny_task import train, write_images
from common.tools.harness import Row
from gpu.job import Job

STEPS, SAVED = 6, 3
MODES = {
    "fp32": (),
    "bf16": ("fp16.mode=AMP_TYPE.TORCH", "fp16.dtype='bfloat16'"),
    "fp16": ("fp16.mode=AMP_TYPE.TORCH", "fp16.dtype='float16'"),
}
REPEATS = 20  # of an all-reduce
TOLERANCE = 1e-3  # on a GPU, whose kernels may sum in another order each time; another dropout makes 6e-3


def resume(job: Job) -> Iterator[Row]:
    """Train six steps, the same again, and three that are saved and resumed; compare weights and AdamW's state."""
    data = write_images(job.new_folder("data"))
    for mode, settings in list(MODES.items())[:: 2 if job.tiny else 1]:
        folder = job.new_folder(mode)
        for name, *ends in (("once", STEPS), ("again", STEPS), ("resumed", SAVED, STEPS)):
            for end in ends:
                with open(os.devnull, "w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                    train(data, folder / name, "MODEL.dropout=0.1", f"MAX_STEPS={end}", *settings)
        row = {"mode": mode, "steps": STEPS, "saved_after": SAVED}
        row |= {name: _difference(folder / "once", folder / name) for name in ("again", "resumed")}
        if not row["resumed"] <= 3 * row["again"] + (TOLERANCE if job.on_gpu else 0):
            row["wrong"] = f"{mode}: a resumed run differs"
        yield row


def _difference(one: Path, other: Path) -> float:
    """Return the relative difference of the last checkpoints: norm of the difference over norm."""
    pairs = [[_numbers(run, file) for run in (one, other)] for file in (MODEL, OPTIMIZER)]
    return max(((theirs - ours).norm() / ours.norm()).item() for ours, theirs in pairs)


def _numbers(run: Path, file: str) -> Tensor:
    tensors = load_file(newest_checkpoint(run / "checkpoints") / file)
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def collectives(job: Job) -> Iterator[Row]:
    """All-reduce in the process group of training, NCCL's on GPUs, with one process, and with two on two GPUs."""
    for ranks in (1, 2):
        row = {"ranks": ranks, "backend": "nccl" if job.on_gpu else "gloo"}
        if job.on_gpu and torch.cuda.device_count() < ranks:
            yield row | {"not_run": f"needs {ranks} GPUs"}
            continue
        result = job.folder / f"ranks{ranks}.json"
        method = "spawn" if job.on_gpu else "fork"  # a forked process cannot use a GPU
        start_processes(_all_reduce, (ranks, free_port(), job, result), nprocs=ranks, start_method=method)
        row |= json.loads(result.read_text())
        yield row if row["right"] else row | {"wrong": f"a wrong sum over {ranks} processes"}


def _all_reduce(rank: int, ranks: int, port: int, job: Job, result: Path) -> None:
    started = time.perf_counter()
    launch({}, rank, ranks, "127.0.0.1", port, backend="nccl" if job.on_gpu else "gloo", verbose=False)
    device = torch.device("cuda", rank) if job.on_gpu else torch.device("cpu")
    numbers = torch.arange(1 << (10 if job.tiny else 26), dtype=torch.float32, device=device)
    total = numbers * (rank + 1)
    dist.all_reduce(total)
    is_right = torch.equal(total, numbers * sum(range(1, ranks + 1)))  # which waits for the device
    first = time.perf_counter() - started
    row = {"version": ".".join(map(str, torch.cuda.nccl.version())) if job.on_gpu else "", "first_s": first}
    if job.on_gpu:
        for _ in range(2):  # once as a warm-up
            started = time.perf_counter()
            for _ in range(REPEATS):
                dist.all_reduce(total.zero_())
            torch.cuda.synchronize(device)
        row["gb_per_s"] = REPEATS * numbers.nbytes / 1e9 / (time.perf_counter() - started)
    shutdown()
    if rank == 0:
        result.write_text(json.dumps(row | {"right": is_right}))
