"""Pieces: what parts of a step take."""

import statistics
import warnings
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from campaign.data import cifar_loader, repeat
from campaign.engines import PRECISIONS, TINY, open_engine, time_rounds, train_step
from campaign.job import Job, Row
from cifar10_benchmark.dataloader import READ_AHEAD
from common.config import load_config
from common.model import PatchEmbed

KERNELS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def attention(job: Job) -> Iterator[Row]:
    """Time forward and backward pass of ViT-B/16's attention by each of PyTorch's kernels."""
    shape, dtype = ((2, 2, 5, 16), torch.float32) if job.tiny else ((128, 12, 197, 64), torch.bfloat16)
    q, k, v = (torch.randn(shape, device=job.device, dtype=dtype, requires_grad=True) for _ in range(3))

    def attend() -> None:
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    yield {"kernel": "chosen by PyTorch"} | _milliseconds(job, attend)
    for name in KERNELS:
        with sdpa_kernel(getattr(SDPBackend, name)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a kernel cannot be had
            try:
                yield {"kernel": name} | _milliseconds(job, attend)
            except RuntimeError as error:
                yield {"kernel": name, "not_run": str(error).splitlines()[0]}


def patch_embedding(job: Job) -> Iterator[Row]:
    """Time forward and backward pass of ViT-B/16's patch embedding, by the layout of images and weights."""
    size, width, batch = (32, 32, 2) if job.tiny else (224, 768, 128)
    for layout in (torch.contiguous_format, torch.channels_last):
        embed = PatchEmbed(16, width).to(job.device, memory_format=layout)
        images = torch.randn(batch, 3, size, size, device=job.device).to(memory_format=layout)

        def step(embed: PatchEmbed = embed, images: torch.Tensor = images) -> None:
            with torch.autocast(job.device.type, torch.bfloat16):
                embed(images).sum().backward()

        yield {"layout": str(layout).removeprefix("torch.")} | _milliseconds(job, step)


def side_stream(job: Job) -> Iterator[Row]:
    """Time steps of ViT-Lite-7/4 at batch 512 alone, CIFAR-10's augmented batches alone, and both as in training."""
    recipe = load_config("vit_lite_vanilla")
    model, batch = (TINY, 4) if job.tiny else (recipe["MODEL"], recipe["TOTAL_BATCH_SIZE"])
    batches = repeat(cifar_loader(recipe["DATA"], batch, model["image_size"], job.device))
    with open_engine(model, PRECISIONS["bf16"]) as engine:
        ready = next(batches)
        works = {
            "step": lambda: train_step(engine, ready),
            "batch": lambda: next(batches),
            "both": lambda: train_step(engine, next(batches)),
        }
        times = {}
        for name, work in works.items():
            times[name] = _milliseconds(job, lambda work=work: [work() for _ in range(READ_AHEAD)])["ms"] / READ_AHEAD
            yield {"work": name, "ms": times[name]}
    hidden = (times["step"] + times["batch"] - times["both"]) / times["batch"]
    yield {"work": "share of the batch's time that both save", "share": hidden}


def _milliseconds(job: Job, work: Callable[[], object]) -> Row:
    work()
    seconds = time_rounds(job, work, rounds=5, at_least=0 if job.tiny else 0.2)
    return {"ms": 1e3 * statistics.median(seconds), "n": len(seconds)}
