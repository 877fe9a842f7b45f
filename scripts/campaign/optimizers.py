"""Pieces: what an optimiser's step takes."""

import statistics
from collections.abc import Callable, Iterator

import lamb as benchmark
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from campaign.engines import VIT_B16
from campaign.job import Job, Row
from common.tools.harness import timed


def lamb(job: Job) -> Iterator[Row]:
    """Time a step of LAMB and AdamW, ours and others', over the tensors of ViT-B/16, interleaved."""
    params = benchmark.random_parameters(benchmark.TINY if job.tiny else VIT_B16, job.device)
    steps, rounds = (benchmark.STEPS_ON_GPU, 9) if job.on_gpu else (1, 3)
    figures = benchmark.compare(params, rounds, benchmark.timed_on_gpu if job.on_gpu else timed)
    for name, rounds in figures.items():
        ratios = [turn["wall"] / ours["wall"] for turn, ours in zip(rounds, figures["ours"], strict=True)]
        yield {
            "optimizer": name,
            "ms": 1e3 * statistics.median(turn["wall"] for turn in rounds) / steps,
            "host_ms": 1e3 * statistics.median(turn["cpu"] for turn in rounds) / steps,
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
