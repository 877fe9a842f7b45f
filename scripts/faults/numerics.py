"""Losses and gradients that are not finite."""

import random
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from common.checkpoint.save import find_fault, newest_checkpoint
from common.colossal import BaseHook, Trainer
from common.metrics.writers import read_metrics
from faults.lab import TENSOR_PARALLEL, TWO, Lab, Recovery, Trial, fault, read_result
from faults.places import Place, add_hook, at, in_order, kill, on
from faults.processes import expect

LIMIT = 3


class Spoil(BaseHook):
    """Make the loss of ``steps`` NaN, or a gradient in the middle of their accumulation infinite."""

    def __init__(self, what: str, steps: range) -> None:
        super().__init__(priority=5)
        self.what, self.steps = what, steps

    def before_train(self, trainer: Trainer) -> None:
        if self.what == "loss":
            trainer.engine.model.register_forward_hook(lambda model, inputs, output: self._spoil(trainer, output))

    def _spoil(self, trainer: Trainer, output: Tensor) -> Tensor:
        return output * float("nan") if trainer.engine.model.training and trainer.step + 1 in self.steps else output

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        if self.what == "gradient" and not trainer.update_done and trainer.step + 1 in self.steps:
            next(p for p in trainer.engine.model.parameters() if p.grad is not None).grad[0] = float("inf")


def skipped(lab: Lab, choice: random.Random, what: str) -> Recovery:
    """Spoil step 5 on one rank: all ranks skip and count the update, also in a run that is killed later."""
    mode = choice.choice((TWO, TENSOR_PARALLEL["1d-2"]))
    rank = mode.choose_rank(choice)
    print(f"    {mode.name}: {what} of rank {rank}", flush=True)
    whole, pieces = Trial(lab, mode), Trial(lab, mode)
    spoil, killing = on(rank, lambda: add_hook(Spoil(what, range(5, 6)))), at(Place("step", 11), kill, 0)
    whole.run(spoil).expect(0)
    pieces.run(in_order(spoil, killing)).expect_code(0, -9)
    pieces.run().expect(0)
    counts = [record["skipped"] for record in read_metrics(whole.output) if record["kind"] == "train"]
    expect(counts == [0, 0, 1, 1, 1, 1], f"skipped updates: {counts}")
    weights = load_file(newest_checkpoint(whole.checkpoints) / "model.safetensors")
    expect(all(tensor.isfinite().all() for tensor in weights.values()), "weights are not finite")
    return Recovery(read_result(pieces.output) == read_result(whole.output), pieces.seconds - whole.seconds)


def endless(lab: Lab, choice: random.Random, what: str) -> Recovery:
    """Spoil every step from 7 on: the run stops and names the last intact checkpoint, from which it resumes."""
    trial = Trial(lab, TWO.but(f"MAX_SKIPPED = {LIMIT}"))
    rank = trial.mode.choose_rank(choice)
    ended = trial.run(on(rank, lambda: add_hook(Spoil(what, range(7, 99))))).expect_code(0, 2)
    last = newest_checkpoint(trial.checkpoints)
    ended.expect_words(f"{LIMIT + 1} consecutive updates were skipped", f"the last checkpoint is {last}")
    expect(find_fault(last) is None, find_fault(last))
    trial.run().expect(0)
    # the steps that were skipped before that checkpoint stay skipped
    return Recovery(None, trial.seconds - lab.reference(trial.mode)[0])


for name, inject, tries in (("once: skipped and counted", skipped, 2), ("endless: the run stops", endless, 1)):
    fault(f"NaN loss on one rank, {name}", tries, 0, what="loss")(inject)
    fault(f"infinite gradient on one rank, {name}", tries, 1, what="gradient")(inject)
