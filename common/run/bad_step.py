"""Steps that are not finite name themselves: micro-batch, rank, gradient and images."""

from collections import defaultdict, deque
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from common.checkpoint.content import METRICS
from common.data.loader import Loader
from common.data.sharing import ALONE
from common.engine.collectives import gather
from common.engine.step_optimizer import CHECK_EVERY
from common.engine.step_probes import StepProbe
from common.engine.tensor_parallel.sharding import named_shards
from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook, gpc
from common.files import Values
from common.metrics.hook import MetricsHook
from common.metrics.loggers import warn
from common.text import list_some

NAMED = 5  # images


class BadStepHook(BaseHook):
    """Record steps that are not finite, as soon as the host learns that updates were skipped.

    The first is a warning too, and their number at the end. On a CPU the host learns of it at the
    step's end, on a GPU up to 40 steps later. Overflows of float16's loss scale are no bad steps.
    Steps recorded as CUDA graphs leave no probes: of those the first one and its images are named,
    if there is no loss scale.
    """

    def __init__(self, model: nn.Module, metrics: MetricsHook):
        super().__init__(priority=-1)  # the metrics' loggers are open then
        self.model = model
        self.metrics = metrics
        self.positions: deque[tuple[int, Values]] = deque(maxlen=2 * CHECK_EVERY)
        self.noted: list[int] = []  # steps

    def before_train(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.loader: Any = getattr(trainer.train_dataloader, "loader", None)
        trainer.engine.optimizer.on_skipped = self._note

    def before_train_iter(self, trainer: Trainer) -> None:
        if trainer.engine.optimizer.accumulated == 0 and isinstance(self.loader, Loader):
            self.positions.append((trainer.step + 1, self.loader.state_dict()))

    def after_train(self, trainer: Trainer) -> None:
        # On a GPU the last steps are not known yet.
        optimizer = trainer.engine.optimizer
        optimizer.note_skipped(optimizer.counter.counts.tolist())
        if len(self.noted) > 1 and self.metrics.loggers:
            steps = list_some([f"{step:,}" for step in self.noted], most=10)
            warn(
                f"{len(self.noted)} steps were not finite and changed nothing: {steps}; "
                f"{METRICS} has their images"
            )

    def _note(self, first: int) -> None:
        """Note the bad steps that the ranks have not noted yet; ``first`` is the first skipped."""
        engine = self.trainer.engine
        last = max(self.noted, default=0)
        new = [probe for probe in engine.probes if probe.step > last and probe.is_bad()]
        if engine.graphs is not None and engine.optimizer.scaler is None and not last:
            new = [StepProbe(first)]
        by_step = defaultdict(list)
        for own in gather([*map(self._describe, new)]):
            for found in own:
                by_step[found["step"]].append(found)
        for step, found in sorted(by_step.items()):
            # A rank whose own loss is finite has got the gradient of others.
            self._log(step, min(found, key=lambda own: "rank" not in own["where"]))

    def _log(self, step: int, found: Values) -> None:
        if not self.noted:
            self.trainer.states["bad_step"] = (
                f"; the first step that was not finite was {step:,}: add --replay {step} to the "
                "command"
            )
            if self.metrics.loggers:
                warn(
                    f"step {step:,}: {found['text']}. For more, add --replay {step} to the command"
                )
        self.noted.append(step)
        if self.metrics.loggers:
            self.metrics.log_non_finite(self.trainer, step, found["where"])

    def _describe(self, probe: StepProbe) -> Values:
        """Return what this rank knows of the step."""
        number = probe.find_micro_batch()
        micro_batches = self._list_images(probe.step)
        where: Values = {}
        if number is None:
            # Recorded steps have no losses.
            text = f"{'' if probe.losses else 'the loss or '}a gradient is not finite"
            images = list(chain(*micro_batches))
        else:
            where = {"micro_batch": number, "rank": gpc.get_global_rank()}
            loss = probe.losses[number].item()
            text = f"the loss of micro-batch {number} on rank {where['rank']} is {loss:.4g}"
            images = micro_batches[number] if micro_batches else []
            rows = (~probe.sums[number].isfinite()).nonzero().flatten().tolist()
            if rows and images:
                text += f", the output for {len(rows)} of {len(images)} images is not finite"
                images = [images[row] for row in rows]
        # The first: a name may have to be read.
        where["images"] = [*map(self.loader.name_image, images[:NAMED])]
        if images:
            text += f": {list_some([*where['images'], *map(str, images[NAMED:])], NAMED)}"
        for name, parameter in reversed(named_shards(self.model).items()):
            if not probe.norms.get(parameter, torch.zeros(())).isfinite():
                text += f"; the first gradient, from the output back: {name}"
                break
        return {"step": probe.step, "where": where, "text": text}

    def _list_images(self, step: int) -> list[list[int]]:
        """Return the indices of the images of this rank's micro-batches in ``step``."""
        position = dict(self.positions).get(step)
        if position is None:
            return []
        # All rows, of which this rank may have decoded some.
        sampler = replace(self.loader.sampler, sharing=ALONE)
        draws = sampler.draws(position["epoch"], position["samples"])
        accumulation = self.trainer.engine.optimizer.accumulation
        return [draw.indices.tolist() for draw in islice(draws, accumulation)]
