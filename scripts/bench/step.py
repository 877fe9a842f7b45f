"""Compare our training loop with a bare one, timm's, Lightning's and accelerate's, and evaluation with forward alone.

python scripts/bench/step.py [--rounds 4] [--steps 4] [--set KEY=VALUE ...] [--data CIFAR10]

ViT-Lite-7/4 as in configs/vit_lite_vanilla.py, in bfloat16, at batch 64 unless --set says otherwise, over batches in
memory, on one thread. Each loop has a process of its own, and they take rounds of some steps, or of an evaluation of
five times as many batches, since what is done once in an evaluation is part of it. Because processes that do the same
differ more than the loops do, all are started anew for each round, and warmed up by a turn that is not counted. `hooks`
are our metrics, progress bar, TensorBoard and curves, timed where they are called. `loop alone` is the same with a
model so small (as many tensors, of width 8, and one image) that the loop is most of it, in processes that stay. All but
one have memory handled as in our training (common/cpu_memory.py, common/huge_pages.py). Libraries of
requirements-bench.txt that are not installed are left out.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import loops
import our_loop
import table
from job import Job
from loops import train_quietly
from our_loop import EVALUATED

from common.errors import run_command
from common.tools.harness import Figures, Rounds, in_processes, interleave

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
BATCHES_PER_STEP = 5  # of an evaluation, for each training step of a turn
TRAINED = 50_000  # images of CIFAR-10


def main(argv: list[str]) -> None:
    args = table.parse_options(
        argv,
        __doc__,
        rounds=4,
        steps=dict(type=int, default=4, help="optimiser steps of a turn (default: 4)"),
        set=dict(action="append", default=[], metavar="KEY=VALUE", help="override a key of the recipe"),
        data=dict(default=os.environ.get("DATA"), help="CIFAR-10's folder (default: $DATA, else random images)"),
    )
    rounds, steps, data = (2, 2, None) if args.tiny else (args.rounds, args.steps, args.data)
    settings = ("TOTAL_BATCH_SIZE=64", *args.set, *(NO_WORK if args.tiny else ()))
    job = Job(settings, steps, rounds=2, data=data)
    test = replace(job, steps=BATCHES_PER_STEP * steps)
    small = Job((*settings, *NO_WORK), steps if args.tiny else 25 * steps, rounds + 1, None)

    def save(part: str, rows: list[dict[str, str]]) -> None:
        table.report("step", part, rows, args.csv, PEERS.values())

    training, evaluation = compare(LOOPS, job, rounds), compare(EVALUATIONS, test, rounds)
    save("training", table.summarise(training, "bare", units=steps))
    save("evaluation", table.summarise(evaluation, "forward alone", units=test.steps))
    save("hooks", table.summarise(share_of_hooks(training["ours"], evaluation["ours"], job, test), "an epoch"))
    save("loop alone", table.summarise(compare(LOOPS, small), "bare", units=small.steps))


def compare(
    loops: Mapping[str, Callable[[Job, Rounds], None]], job: Job, starts: int = 1
) -> dict[str, list[Figures] | None]:
    """Return each loop's figures but for the first turn after each start; None for what is not installed."""
    present = [name for name in loops if name not in PEERS or find_spec(PEERS[name])]
    compared: dict[str, list[Figures] | None] = {name: [] if name in present else None for name in loops}
    for _ in range(starts):
        with in_processes({name: partial(train_quietly, loops[name], job) for name in present}) as variants:
            for name, figures in interleave(variants, job.rounds).items():
                compared[name] += figures[1:]
        present = present[1:] + present[:1]  # each is the first one once
    return compared


def share_of_hooks(
    training: list[Figures], evaluation: list[Figures], train_job: Job, test_job: Job
) -> dict[str, list[Figures]]:
    """Return the time of an epoch by these figures, with an evaluation at its end, and what the hooks take of it."""
    batch = train_job.config["TOTAL_BATCH_SIZE"]
    trained, evaluated = TRAINED / batch / train_job.steps, EVALUATED / batch / test_job.steps  # rounds in an epoch
    epochs, hooks = [], []
    for train, test in zip(training, evaluation, strict=True):
        epochs.append({"wall": trained * train["wall"] + evaluated * test["wall"] + test["after_test"]})
        in_batches = trained * train["after_train_iter"] + evaluated * test["after_test_iter"]
        hooks.append({"wall": in_batches + test["after_test"]})
    return {"an epoch": epochs, "our hooks in it": hooks}


if __name__ == "__main__":
    run_command(main)
