"""Warn when a run falls back to the CPU."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from common.model.flops import peak_images_per_s

DRIVERS = {"13": "580", "12": "525"}  # the oldest NVIDIA driver on Linux, by CUDA's major version
VERSION = Path("driver/nvidia/version")  # below /proc


def explain_cpu(config: Mapping[str, Any], total_batch: int, processes: int, root: Path = Path("/")) -> str | None:
    """Return a warning with the reason and a lower bound of the step time, or None.

    Warns if torch cannot use an NVIDIA device, or if the recipe targets GPUs: more than one, or ViT-S or larger at 224
    pixels. ``root`` contains ``/dev`` and ``/proc``.
    """
    if torch.cuda.is_available():
        return None
    model = config["MODEL"]
    reasons = (
        [_unused_gpu(root)] if (root / "dev/nvidia0").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "" else []
    )
    is_large = model["width"] >= 384 and model["image_size"] >= 224
    if is_large or config["GPUS"] > 1:
        missing = "" if reasons else ", and there is none"
        remedy = "" if is_large else f" (GPUS={config['GPUS']}; set GPUS=1 if it is not)"
        reasons.append(f"the recipe is written for GPUs{missing}{remedy}")
    if not reasons:
        return None
    warning = f"warning: training on the CPU: {'; '.join(reasons)}"
    seconds = total_batch / peak_images_per_s(model, config["fp16"], processes, torch.device("cpu"), config["FREEZE"])
    if seconds < 0.1:
        return warning
    duration = f"{seconds:.2g} s" if seconds < 100 else f"{seconds / 60:,.0f} min"
    return f"{warning}; a step of {total_batch:,} images takes at least {duration}"


def _unused_gpu(root: Path) -> str:
    """Return the installed driver and the one that torch needs."""
    cuda = torch.version.cuda
    if cuda is None:
        return "torch is a build without CUDA, see Requirements in README.md"
    needed = f"torch is built for CUDA {cuda}, which needs driver {DRIVERS.get(cuda.partition('.')[0], '580')} or later"
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", (root / "proc" / VERSION).read_text())
    except OSError:
        found = None
    driver = f"the NVIDIA driver is {found[0]}" if found else "the NVIDIA driver is not loaded"
    return f"torch cannot use the GPU: {driver}, {needed} (see Requirements in README.md)"
