"""The hook of batches that change while training."""

import math
from typing import Any

from common.config.plan import BatchCut, Plan, rate_factor
from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook
from common.resolutions import resolution_at, schedule_step
from common.text import print_wrapped, two_digits


class BatchHook(BaseHook):
    """Set the rates of steps that have several batches; with BATCH_SIZES="noise" choose these.

    The schedule itself counts steps of the smallest batch, the trainer those of any size. The batch
    of an epoch is chosen after the last step of the one before: a checkpoint of that step has it,
    in ``metadata``, the content of config.json.
    """

    def __init__(self, plan: Plan, metadata: dict[str, Any], is_main: bool):
        super().__init__(priority=-1)  # before the hooks that read what it sets
        self.plan = plan
        self.metadata = metadata
        self.config = metadata["config"]
        self.is_main = is_main

    def before_train_epoch(self, trainer: Trainer) -> None:
        # Only here: a checkpoint has been loaded.
        self._set_rates(trainer)

    def after_train_iter(self, trainer: Trainer, *_: object) -> None:
        if not trainer.update_done:
            return
        is_chosen = self.config["BATCH_SIZES"] == "noise"
        # After the last step by MAX_STEPS too, from which the run may go on.
        if is_chosen and trainer.epoch_step == 0 and trainer.cur_epoch < self.plan.epochs:
            self._choose_batch(trainer)
        self._set_rates(trainer)

    def _choose_batch(self, trainer: Trainer) -> None:
        """Double the batch from the next epoch on, if the noise scale asks for it."""
        resolutions = self.plan.resolutions
        epoch = trainer.cur_epoch
        batch = resolution_at(resolutions, epoch).total_batch
        noise_scale: Any = trainer.engine.noise_scale
        # An all-reduce: equal on all ranks, which decide alike.
        scale = noise_scale.value().item()
        is_asked_for = 2 * batch <= scale * self.config["NOISE_FACTOR"] < math.inf
        if batch == self.plan.total_batch or not is_asked_for:
            return
        batches = [(each.end, each.total_batch) for each in resolutions if each.end < epoch]
        batches += [(epoch, batch), (self.config["NUM_EPOCHS"], 2 * batch)]
        train_samples = self.metadata["data"]["train_samples"]
        cut = BatchCut.of_plan(self.config, self.plan, train_samples)
        # In place: the loader, the trainer and other hooks have the list.
        resolutions[:] = cut.resolutions(batches)
        changed = self.plan.with_steps(self.config["MAX_STEPS"]).to_dict()
        self.metadata["plan"] |= {name: changed[name] for name in ("resolutions", "last_step")}
        if self.is_main:
            print_wrapped(
                f"noise scale {two_digits(scale)} images after epoch {epoch}: batches of "
                f"{2 * batch:,} from step {trainer.step + 1:,} on"
            )

    def _set_rates(self, trainer: Trainer) -> None:
        """Set the rates of the next step."""
        schedule: Any = trainer.engine.lr_scheduler
        factor = rate_factor(self.config, self.plan, trainer.cur_epoch)
        step = schedule_step(self.plan.resolutions, trainer.step)
        groups = trainer.engine.optimizer.param_groups
        for group, rate, fraction in zip(
            groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
        ):
            group["lr"] = rate * fraction(step) * factor
