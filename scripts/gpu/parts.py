"""Pieces: what parts of a step take."""

import statistics
import warnings
from collections.abc import Callable, Iterator

import torch
from bench import lamb as benchmark
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from common.model.vit import PatchEmbed
from common.tools.harness import Row, timed
from gpu.engines import VIT_B16, time_rounds
from gpu.job import Job

KERNELS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def attention(job: Job) -> Iterator[Row]:
    """Time forward and backward pass of ViT-B/16's attention by each of PyTorch's kernels."""
    shape, dtype = ((2, 2, 5, 16), torch.float32) if job.tiny else ((128, 12, 197, 64), torch.bfloat16)
    q, k, v = (torch.randn(shape, device=job.device, dtype=dtype, requires_grad=True) for _ in range(3))

    def attend() -> None:
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    yield {"kernel": "chosen by PyTorch"} | milliseconds(job, attend)
    for name in KERNELS:
        with sdpa_kernel(getattr(SDPBackend, name)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a kernel cannot be had
            try:
                yield {"kernel": name} | milliseconds(job, attend)
            except RuntimeError as error:
                yield {"kernel": name, "not_run": str(error).splitlines()[0]}


def patch_embedding(job: Job) -> Iterator[Row]:
    """Time forward and backward pass of ViT-B/16's patch embedding, by the layout of images and weights."""
    size, width, batch = (32, 32, 2) if job.tiny else (224, 768, 128)
    for layout in (torch.contiguous_format, torch.channels_last):
        embed = PatchEmbed(16, width).to(job.device, memory_format=layout)
        images = torch.randn(batch, 3, size, size, device=job.device).to(memory_format=layout)

        def step(embed: PatchEmbed = embed, images: torch.Tensor = images) -> None:
            with torch.autocast(job.device.type, torch.bfloat16, enabled=job.has_bfloat16):
                embed(images).sum().backward()

        yield {"layout": str(layout).removeprefix("torch.")} | milliseconds(job, step)


def milliseconds(job: Job, work: Callable[[], object]) -> Row:
    """Return the median time of ``work``, after a first time that does not count."""
    work()
    seconds = time_rounds(job, work, rounds=5, at_least=0 if job.tiny else 0.2)
    return {"ms": 1e3 * statistics.median(seconds), "n": len(seconds)}


def lamb(job: Job) -> Iterator[Row]:
    """Time a step of LAMB and AdamW, ours and others', over the tensors of ViT-B/16, interleaved."""
    params = benchmark.random_parameters(benchmark.TINY if job.tiny else VIT_B16, job.device)
    steps, rounds = (benchmark.STEPS_ON_GPU, 9) if job.on_gpu else (1, 3)
    figures = benchmark.compare(params, rounds, benchmark.timed_on_gpu if job.on_gpu else timed)
    for name, rows in figures.items():
        ratios = [row["wall"] / ours["wall"] for row, ours in zip(rows, figures["ours"], strict=True)]
        yield {
            "optimizer": name,
            "ms": 1e3 * statistics.median(row["wall"] for row in rows) / steps,
            "host_ms": 1e3 * statistics.median(row["cpu"] for row in rows) / steps,
            "x_ours": statistics.median(ratios),
            "kernels": _count_kernels(params, benchmark.OPTIMIZERS[name]) if job.on_gpu else "",
            "n": rounds,
        }


def _count_kernels(params: list[Tensor], build: Callable[..., Optimizer]) -> int:
    """Return how many kernels and copies a step starts on the GPU."""
    optimizer = build(params, lr=1e-6, weight_decay=0.1)
    optimizer.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        optimizer.step()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in trace.events())
