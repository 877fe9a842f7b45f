"""Measure how long training waits for a checkpoint of ViT-B/16 with LAMB.

python scripts/bench/saving.py [--rounds 5] [--folder DIR]

The loop waits only for the copy; a thread of rank 0 then writes it, with checksums, to DIR (default: the temporary
folder). A second save waits until the first is on disk.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from lamb import TINY, VIT_B16

from common.checkpoint.model_state import copy_state
from common.checkpoint.save import write_checkpoint
from common.errors import run_command
from common.model.vit import build_model
from common.optim.build import build_optimizer
from common.tools.benchmark import run_benchmark
from common.tools.harness import Row, interleave, timed
from common.tools.result_rows import summarise


def main(argv: list[str]) -> None:
    folder = dict(help="where to write (default: the temporary folder)")
    run_benchmark("saving", measure, argv, __doc__, rounds=5, folder=folder)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for the copy and a row for writing it."""
    model = build_model(**(TINY if args.tiny else VIT_B16))
    optimizer = build_optimizer(model, "lamb", learning_rate=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes the moments
    state = copy_state(model, optimizer)
    size = sum(tensor.nbytes for tensors in state.values() for tensor in tensors.values())
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        variants = {
            "copying": lambda: timed(lambda: copy_state(model, optimizer)),
            "writing": lambda: timed(lambda: write_checkpoint(Path(place) / "step-00000001", state)),
        }
        yield from summarise(interleave(variants, args.rounds), "copying", part=f"{size / 1e9:.2f} GB")


if __name__ == "__main__":
    run_command(main)
