"""Losses and gradients that are not finite."""

import random
from typing import Any

from torch import Tensor

from common.checkpoint.save import find_fault, load_model_state, newest_checkpoint
from common.colossal import BaseHook, Trainer
from common.metrics.writers import read_metrics
from faults.lab import TENSOR_PARALLEL, TWO, Lab, Recovery, Trial, fault, result
from faults.places import Place, add_hook, at, kill, on
from faults.processes import expect

LIMIT = 3


class Spoil(BaseHook):
    """Make the loss of the steps ``steps`` NaN, or a gradient in the middle of their accumulation infinite."""

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
    """Spoil step 5 on one rank: the update is skipped on all and counted, also where the run is killed later."""
    mode = choice.choice((TWO, TENSOR_PARALLEL["1d-2"]))
    rank = mode.choose_rank(choice)
    print(f"    {mode.name}: {what} of rank {rank}", flush=True)
    whole, pieces = lab.new_folder(), lab.new_folder()
    spoil, killing = on(rank, lambda: add_hook(Spoil(what, range(5, 6)))), at(Place("step", 11), kill, 0)

    def spoil_and_kill(own: int) -> None:
        spoil(own)
        killing(own)

    seconds = lab.run(mode, whole, spoil).expect(0).seconds
    lost = lab.run(mode, pieces, spoil_and_kill).seconds + lab.run(mode, pieces).expect(0).seconds - seconds
    counts = [record["skipped"] for record in read_metrics(whole) if record["kind"] == "train"]
    expect(counts == [0, 0, 1, 1, 1, 1], f"skipped updates: {counts}")
    weights = load_model_state(newest_checkpoint(whole / "checkpoints"))
    expect(all(tensor.isfinite().all() for tensor in weights.values()), "weights are not finite")
    return Recovery(result(pieces) == result(whole), lost)


def endless(lab: Lab, choice: random.Random, what: str) -> Recovery:
    """Spoil every step from 7 on: the run stops and names the last good checkpoint, from which it resumes."""
    trial = Trial(lab, TWO.but(f"MAX_SKIPPED = {LIMIT}"))
    rank = trial.mode.choose_rank(choice)
    ended = trial.run(on(rank, lambda: add_hook(Spoil(what, range(7, 99)))))
    expect(ended.codes[0] == 2, f"{ended.codes}: {ended.printed}")
    last = newest_checkpoint(trial.checkpoints)
    ended.expect_words(f"{LIMIT + 1} updates in a row were skipped", f"the last checkpoint is {last}")
    expect(find_fault(last) is None, find_fault(last))
    trial.run().expect(0)
    return Recovery(None, trial.seconds_lost)  # the steps that were skipped before that checkpoint stay so


for name, inject, tries in (("once: skipped and counted", skipped, 2), ("endless: the run stops", endless, 1)):
    fault(f"NaN loss on one rank, {name}", tries, 0, what="loss")(inject)
    fault(f"infinite gradient on one rank, {name}", tries, 1, what="gradient")(inject)
