"""Measure how long training waits for a checkpoint of ViT-B/16 with LAMB: ``python scripts/saving_cost.py [FOLDER]``.

The loop waits for the copy alone; a thread of rank 0 then writes it, with checksums, to FOLDER's disk (default: that of
temporary files). A second save that comes before the first is on disk waits for it. Medians of 5 saves.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common.checkpoint.model_state import copy_state
from common.checkpoint.save import write_checkpoint
from common.model.vit import build_model
from common.optim.build import build_optimizer

SAVES = 5


def main(folder: str | None = None) -> None:
    model = build_model(image_size=224, patch_size=16, width=768, depth=12, heads=12, num_classes=1000)
    optimizer = build_optimizer(model, "lamb", learning_rate=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes the moments
    copying, writing = [], []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for number in range(SAVES):
            seconds, state = timed(copy_state, model, optimizer)
            copying.append(seconds)
            writing.append(timed(write_checkpoint, Path(place) / f"step-{number % 2:08d}", state)[0])
    size = sum(tensor.nbytes for tensors in state.values() for tensor in tensors.values())
    print(
        f"a checkpoint of ViT-B/16 with LAMB, {size / 1e9:.2f} GB: training waits {median(copying):.2f} s for the copy "
        f"({min(copying):.2f} to {max(copying):.2f}), writing goes on for {median(writing):.1f} s beside it "
        f"({min(writing):.1f} to {max(writing):.1f}); n={SAVES}"
    )


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the seconds that a call takes, and what it returns."""
    started = time.perf_counter()
    answer = function(*arguments)
    return time.perf_counter() - started, answer


if __name__ == "__main__":
    main(*sys.argv[1:])
