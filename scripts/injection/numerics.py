"""Losses and gradients that are not finite."""

import functools
import random
from typing import Any

from injection.bench import TENSOR_PARALLEL, TWO, Bench, Fault, Recovery, choose_rank, result
from injection.processes import expect
from injection.victims import Place, add_hook, at, kill, on
from torch import Tensor

from common.checkpoint.save import find_fault, load_model_state, newest_checkpoint
from common.colossal import BaseHook, Trainer
from common.metrics.writers import read_metrics

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


def skipped(what: str, bench: Bench, choice: random.Random) -> Recovery:
    """Spoil step 5 on one rank: the update is skipped on all and counted, also where the run is killed later."""
    mode = choice.choice((TWO, TENSOR_PARALLEL[0]))
    rank = choose_rank(choice, mode)
    print(f"    {mode.name}: {what} of rank {rank}", flush=True)
    spoil = on(rank, lambda: add_hook(Spoil(what, range(5, 6))))
    whole, pieces = bench.new_folder(), bench.new_folder()
    seconds = bench.run(mode, whole, spoil).expect(0).seconds

    def spoil_and_kill(own: int) -> None:
        spoil(own)
        on(0, lambda: at(Place("step", 11), kill))(own)

    lost = bench.run(mode, pieces, spoil_and_kill).seconds + bench.run(mode, pieces).expect(0).seconds - seconds
    counts = [record["skipped"] for record in read_metrics(whole) if record["kind"] == "train"]
    expect(counts == [0, 0, 1, 1, 1, 1], f"skipped updates: {counts}")
    weights = load_model_state(newest_checkpoint(whole / "checkpoints"))
    expect(all(tensor.isfinite().all() for tensor in weights.values()), "weights are not finite")
    return Recovery(result(pieces) == result(whole), lost)


def endless(what: str, bench: Bench, choice: random.Random) -> Recovery:
    """Spoil every step from 7 on: the run stops and names the last good checkpoint, from which it goes on."""
    mode = TWO.but(f"MAX_SKIPPED = {LIMIT}")
    seconds, _ = bench.reference(mode)
    output = bench.new_folder()
    rank = choose_rank(choice, mode)
    ended = bench.run(mode, output, on(rank, lambda: add_hook(Spoil(what, range(7, 99)))))
    expect(ended.codes[0] == 2, f"{ended.codes}: {ended.said}")
    last = newest_checkpoint(output / "checkpoints")
    words = f"{LIMIT + 1} updates in a row were skipped", f"the last checkpoint is {last}"
    expect(all(word in ended.said for word in words), ended.said)
    expect(find_fault(last) is None, find_fault(last))
    lost = ended.seconds + bench.run(mode, output).expect(0).seconds - seconds
    return Recovery(None, lost)  # the steps that were skipped before that checkpoint stay so


def numeric_faults() -> list[Fault]:
    """Return the rows."""
    return [
        Fault(f"{value} {what} on one rank, {name}", functools.partial(inject, what), tries, quick)
        for name, inject, tries in (("once: skipped and counted", skipped, 2), ("endless: the run stops", endless, 1))
        for value, what, quick in (("NaN", "loss", 0), ("infinite", "gradient", 1))
    ]
