"""Compare our training loop with a bare one, timm's, Lightning's and accelerate's, and evaluation with forward alone.

python scripts/bench/step.py [--rounds 4] [--steps 4] [--set KEY=VALUE ...] [--data CIFAR10]

ViT-Lite-7/4 as in configs/vit_lite_vanilla.py, in bfloat16 where the CPU has it, else in float32, at batch 64 unless
--set says otherwise, over batches in memory, on one thread. Each loop has a process of its own; they are interleaved,
some steps a round, or an evaluation of five times as many batches, since what is done once in an evaluation is part of
it. Because processes that do the same differ more than the loops do, all are restarted for each round, and warmed up
by a round that is not counted. `loop alone` is training with a model so small (as many tensors, of width 8, and one
image) that the loop is most of it, in processes that stay. Libraries of requirements-bench.txt that are not installed
are left out.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import loops
import our_loop
from job import Job
from loops import train_quietly

from common.errors import run_command
from common.tools.benchmark import run_benchmark
from common.tools.harness import Figures, Rounds, Row, in_processes, interleave
from common.tools.result_rows import summarise

PEERS = {"Lightning": "lightning", "accelerate": "accelerate"}
LOOPS: dict[str, Callable[[Job, Rounds], None]] = {
    "bare": loops.bare,
    "ours": our_loop.ours,
    "timm": loops.timm,
    "timm's loop, our model": loops.timm_around_ours,
    "Lightning": loops.lightning,
    "accelerate": loops.accelerate,
}
EVALUATIONS = {"forward alone": loops.forward_alone, "ours": our_loop.our_evaluation}
NO_WORK = ("MODEL.image_size=8", "MODEL.width=8", "MODEL.heads=2", "TOTAL_BATCH_SIZE=1")
BATCHES_PER_STEP = 5  # of an evaluation, for each training step of a round


def main(argv: list[str]) -> None:
    run_benchmark(
        "step",
        measure,
        argv,
        __doc__,
        rounds=4,
        packages=list(PEERS.values()),
        steps=dict(type=int, default=4, help="optimizer steps of a round (default: 4)"),
        set=dict(action="append", default=[], metavar="KEY=VALUE", help="override a key of the recipe"),
        data=dict(default=os.environ.get("DATA"), help="CIFAR-10's folder (default: $DATA, else random images)"),
    )


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of training, of evaluation, and of the loop alone."""
    rounds, steps, data = (2, 2, None) if args.tiny else (args.rounds, args.steps, args.data)
    settings = ("TOTAL_BATCH_SIZE=64", *args.set, *(NO_WORK if args.tiny else ()))
    job = Job(settings, steps, rounds=2, data=data)
    test = replace(job, steps=BATCHES_PER_STEP * steps)
    small = Job((*settings, *NO_WORK), steps if args.tiny else 25 * steps, rounds + 1, None)
    names = {"precision": loops.PRECISION}
    yield from summarise(compare(LOOPS, job, rounds), "bare", steps, part="training", **names)
    yield from summarise(compare(EVALUATIONS, test, rounds), "forward alone", test.steps, part="evaluation", **names)
    yield from summarise(compare(LOOPS, small), "bare", small.steps, part="loop alone", **names)


def compare(
    loops: Mapping[str, Callable[[Job, Rounds], None]], job: Job, starts: int = 1
) -> dict[str, list[Figures] | None]:
    """Return each loop's figures but for the first round after each start; None for what is not installed."""
    present = [name for name in loops if name not in PEERS or find_spec(PEERS[name])]
    compared: dict[str, list[Figures] | None] = {name: [] if name in present else None for name in loops}
    for _ in range(starts):
        with in_processes({name: partial(train_quietly, loops[name], job) for name in present}) as variants:
            for name, figures in interleave(variants, job.rounds).items():
                compared[name] += figures[1:]
        present = present[1:] + present[:1]  # each is the first one once
    return compared


if __name__ == "__main__":
    run_command(main)
