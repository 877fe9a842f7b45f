"""Pieces: timings of parts of a step."""

import warnings
from argparse import Namespace
from collections.abc import Iterator

import numpy as np
import torch
from bench import lamb as benchmark
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.data.auto_augment import RandAugment
from common.model.vit import PatchEmbed
from common.testing.host_sync import forbid_waiting
from common.tools.harness import Row
from gpu.job import Job

ROUNDED = 0.01  # fraction of pixels that may be rounded otherwise on a GPU; a wrong operation changes most
KERNELS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def attention(job: Job) -> Iterator[Row]:
    """Time forward and backward pass of ViT-B/16's attention at batch 256 by each of PyTorch's kernels."""
    batch, tokens, heads, dtype = (2, 5, 2, torch.float32) if job.tiny else (256, 197, 12, torch.bfloat16)
    qkv_BNC = torch.randn(batch, tokens, 3 * heads * 64, device=job.device, dtype=dtype, requires_grad=True)

    def attend() -> None:  # strided q, k and v, as in the model
        q, k, v = qkv_BNC.unflatten(-1, (3, heads, 64)).permute(2, 0, 3, 1, 4).unbind()
        F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).sum().backward()

    yield {"kernel": "chosen by PyTorch"} | job.milliseconds(attend)
    for name in KERNELS:
        with sdpa_kernel(getattr(SDPBackend, name)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a kernel is not available
            try:
                yield {"kernel": name} | job.milliseconds(attend)
            except RuntimeError as error:
                yield {"kernel": name, "not_run": str(error).splitlines()[0]}


def patch_embedding(job: Job) -> Iterator[Row]:
    """Time forward and backward pass of ViT-B/16's patch embedding at batch 256, by memory format."""
    size, width, batch = (32, 32, 2) if job.tiny else (224, 768, 256)
    for layout in (torch.contiguous_format, torch.channels_last):
        embed = PatchEmbed(16, width).to(job.device, memory_format=layout)
        images = torch.randn(batch, 3, size, size, device=job.device).to(memory_format=layout)

        def step(embed: PatchEmbed = embed, images: Tensor = images) -> None:
            with torch.autocast(job.device.type, torch.bfloat16, enabled=job.has_bfloat16):
                embed(images).sum().backward()

        yield {"layout": str(layout).removeprefix("torch.")} | job.milliseconds(step)


def rand_augment(job: Job) -> Iterator[Row]:
    """Time RandAugment(2, 10) on a batch of 256, as after DALI; it must not wait, and must give what the CPU gives."""
    size, batch = (32, 4) if job.tiny else (224, 256)
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.integers(0, 256, (batch, 3, size, size), np.uint8))
    augment, numbers = RandAugment(2, 10), random.random((batch, 4))
    on_device = augment.augment_batch(images.clone().to(job.device), numbers)  # makes the tables of moved pixels too
    difference = (on_device.cpu().short() - augment.augment_batch(images.clone(), numbers).short()).abs()
    with forbid_waiting(job.device):
        augment.augment_batch(on_device, numbers)
    row: Row = {"batch": batch, "differing_pixels": (difference > 0).double().mean().item()}
    if row["differing_pixels"] > ROUNDED:
        row["wrong"] = f"{row['differing_pixels']:.2%} of the pixels differ from the CPU's"
    yield row | job.milliseconds(lambda: augment.augment_batch(on_device, numbers))


def lamb(job: Job) -> Iterator[Row]:
    """Time a step of LAMB and AdamW, ours and others', over the tensors of ViT-B/16, interleaved, on CPU and GPU."""
    yield from benchmark.measure(Namespace(tiny=job.tiny, rounds=9, threads=[1]))
