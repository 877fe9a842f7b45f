"""Pieces: how fast the model trains, and what its parts take."""

import statistics
from collections.abc import Callable
from typing import Any

import lamb as lamb_benchmark
import torch
from campaign.engines import (
    MODES,
    PRECISIONS,
    TINY,
    VIT_B16,
    VIT_S16,
    measure_steps,
    peak_memory,
    time_rounds,
)
from campaign.job import Job, Row
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from common.interleave import timed
from common.lamb import Lamb
from common.model import PatchEmbed


def amp_imagenet(job: Job) -> dict[str, Any]:
    """Train ViT-B/16 at batch 128 on images of ImageNet's shape, in every mode of mixed precision."""
    model, batch = (TINY, 4) if job.tiny else (VIT_B16, 128)
    modes = dict(list(MODES.items())[::3]) if job.tiny else MODES
    return {"rows": _measure_all(job, [({"mode": mode}, model, config, batch, 1) for mode, config in modes.items()])}


def _throughput(job: Job, model: dict, batch: int, compiled: bool) -> dict[str, Any]:
    precisions, accumulations = PRECISIONS, (1, 16)
    if job.tiny:
        model, batch, precisions, accumulations = TINY, 4, {"bf16": PRECISIONS["bf16"]}, (1, 2)
    cases = [
        (
            {"precision": name, "compiled": compiled, "batch": batch, "accumulation": accumulation},
            model,
            {**config, "COMPILE": compiled},
            batch,
            accumulation,
        )
        for name, config in precisions.items()
        for accumulation in accumulations
    ]
    return {"rows": _measure_all(job, cases)}


def vit_s16_eager(job: Job) -> dict[str, Any]:
    """Train ViT-S/16 at batch 256 in every precision, with and without accumulation."""
    return _throughput(job, VIT_S16, 256, compiled=False)


def vit_s16_compiled(job: Job) -> dict[str, Any]:
    """Train ViT-S/16 at batch 256 with compiled blocks."""
    return _throughput(job, VIT_S16, 256, compiled=True)


def vit_b16_eager(job: Job) -> dict[str, Any]:
    """Train ViT-B/16 at batch 128 in every precision, with and without accumulation."""
    return _throughput(job, VIT_B16, 128, compiled=False)


def vit_b16_compiled(job: Job) -> dict[str, Any]:
    """Train ViT-B/16 at batch 128 with compiled blocks."""
    return _throughput(job, VIT_B16, 128, compiled=True)


def _measure_all(job: Job, cases: list[tuple]) -> list[Row]:
    """Measure the cases in turn; those for which no time is left say so."""
    rows = []
    for names, *case in cases:
        if job.seconds_left < 45:
            rows.append(names | {"not_run": "out of time"})
            continue
        try:
            rows.append(names | measure_steps(job, *case))
        except torch.OutOfMemoryError as error:
            rows.append(names | {"not_run": str(error).splitlines()[0]})
        print(rows[-1], flush=True)
    return rows


def attention(job: Job) -> dict[str, Any]:
    """Time forward and backward pass of ViT-B/16's attention by each of PyTorch's kernels."""
    shape, dtype = ((2, 2, 5, 16), torch.float32) if job.tiny else ((128, 12, 197, 64), torch.bfloat16)
    q, k, v = (torch.randn(shape, device=job.device, dtype=dtype, requires_grad=True) for _ in range(3))

    def attend() -> None:
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    rows = [{"kernel": "chosen by PyTorch"} | _milliseconds(job, attend)]
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        with sdpa_kernel(getattr(SDPBackend, name)):
            try:
                rows.append({"kernel": name} | _milliseconds(job, attend))
            except RuntimeError as error:
                rows.append({"kernel": name, "not_run": str(error).splitlines()[0]})
    return {"rows": rows}


def patch_embedding(job: Job) -> dict[str, Any]:
    """Time forward and backward pass of ViT-B/16's patch embedding, by the layout of images and weights."""
    size, width, batch = (32, 32, 2) if job.tiny else (224, 768, 128)
    rows = []
    for layout in (torch.contiguous_format, torch.channels_last):
        embed = PatchEmbed(16, width).to(job.device, memory_format=layout)
        images = torch.randn(batch, 3, size, size, device=job.device).to(memory_format=layout)

        def step(embed: PatchEmbed = embed, images: torch.Tensor = images) -> None:
            with torch.autocast(job.device.type, torch.bfloat16):
                embed(images).sum().backward()

        rows.append({"layout": str(layout).removeprefix("torch.")} | _milliseconds(job, step))
    return {"rows": rows}


def _milliseconds(job: Job, work: Callable[[], object]) -> Row:
    work()
    seconds = time_rounds(job, work, rounds=5, at_least=0 if job.tiny else 0.2)
    return {"ms": 1e3 * statistics.median(seconds), "n": len(seconds)}


def lamb(job: Job) -> dict[str, Any]:
    """Time a step of LAMB and AdamW, ours and others', over the tensors of ViT-B/16, interleaved."""
    on_gpu = job.device.type == "cuda"
    params = lamb_benchmark.random_parameters(lamb_benchmark.TINY if job.tiny else VIT_B16, job.device)
    steps, rounds = (lamb_benchmark.STEPS_ON_GPU, 9) if on_gpu else (1, 3)
    figures = lamb_benchmark.compare(params, rounds, lamb_benchmark.timed_on_gpu if on_gpu else timed)
    ours = [figure["wall"] for figure in figures["ours"]]
    rows = []
    for name, turns in figures.items():
        walls = [figure["wall"] for figure in turns]
        rows.append(
            {
                "optimizer": name,
                "ms": 1e3 * statistics.median(walls) / steps,
                "host_ms": 1e3 * statistics.median(figure["cpu"] for figure in turns) / steps,
                "x_ours": statistics.median(wall / our for wall, our in zip(walls, ours, strict=True)),
                "n": rounds,
            }
        )
    return {"rows": rows, "kernels_of_a_step_of_ours": _count_kernels(params), **peak_memory(job)}


def _count_kernels(params: list[torch.Tensor]) -> int:
    """Return how many kernels a step of our LAMB starts on the GPU; 0 on a CPU."""
    optimizer = Lamb(params, lr=1e-6, weight_decay=0.1)
    optimizer.step()
    if not params[0].is_cuda:
        return 0
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        optimizer.step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in trace.events())
