"""The training loop."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from common.colossal.engine import Engine
from common.colossal.lost_ranks import naming_lost_ranks
from common.colossal.upstream import BaseHook, UpstreamTrainer


class Trainer(UpstreamTrainer):
    """Upstream's trainer (legacy/trainer/_trainer.py), counting optimiser steps.

    It differs from upstream's in that

    - ``max_steps`` counts optimiser steps, not micro-batches, and needs no logger (:340);
    - the last epoch is always evaluated (``epoch % test_interval``, :328, leaves it out for most intervals);
    - evaluation computes no loss;
    - the engine's schedule moves once per optimiser step, after the hooks have seen its learning rate;
    - progress is for a hook to draw.

    Attributes, for hooks:
        step: optimiser steps completed; in ``after_train_iter`` it counts the one that just ended.
        update_done: whether the last micro-batch ended an optimiser step.
        data_wait: seconds spent waiting for the training loader so far.
        cur_step: micro-batches completed before this one, as upstream counts.
        steps_per_epoch: optimiser steps in an epoch.
    """

    def __init__(self, engine: Engine):
        super().__init__(engine)
        self.step = 0
        self.update_done = False
        self.data_wait = 0.0

    @property
    def device(self) -> torch.device:
        """The device that this process trains on."""
        return self.engine.device

    @naming_lost_ranks()
    def fit(
        self,
        train_dataloader: Any,
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Any = None,
        test_interval: int = 1,
        hooks: Sequence[BaseHook] = (),
    ) -> None:
        """Train for ``epochs`` epochs or ``max_steps`` optimiser steps, whichever ends first.

        Evaluates every ``test_interval`` epochs and after the last one. The loaders are those that `initialize`
        returned. Hooks are called in the order of their ``priority``, in training with ``output`` and ``label`` None,
        in evaluation with ``loss`` None. Raises `UserError` naming the ranks that are gone when a collective fails.
        """
        self._max_epochs, self._max_steps = epochs, max_steps
        self._steps_per_epoch = len(train_dataloader) // self.engine.optimizer.accumulation
        self._reset_states()
        self.hooks = sorted(hooks, key=lambda hook: hook.priority)
        self._call_hooks("after_hook_is_attached")
        self._call_hooks("before_train")
        while self._cur_epoch < epochs and not self._exceed_max_step():
            self._train_epoch(train_dataloader)
            self._cur_epoch += 1
            is_last = self._cur_epoch == epochs or self._exceed_max_step()
            if test_dataloader is not None and (is_last or self._cur_epoch % test_interval == 0):
                self._eval(test_dataloader)
        self._call_hooks("after_train")

    def _train_epoch(self, train_dataloader: Any) -> None:
        self.engine.train()
        batches = self._timed(train_dataloader)
        self._call_hooks("before_train_epoch")
        for _ in range(len(train_dataloader)):
            self._call_hooks("before_train_iter")
            self.engine.zero_grad()
            result = self.engine.execute_schedule(batches, return_output_label=False)
            self.engine.step()
            self.update_done = self.engine.optimizer.accumulated == 0
            self.step += self.update_done
            self._call_hooks("after_train_iter", result)
            self._cur_step += 1
            if self.update_done and self.engine.lr_scheduler is not None:
                self.engine.lr_scheduler.step()
            if self._exceed_max_step():
                break
        self._call_hooks("after_train_epoch")

    def _timed(self, dataloader: Any) -> Iterator[Any]:
        batches, end = iter(dataloader), object()
        while True:
            started = time.perf_counter()
            batch = next(batches, end)
            self.data_wait += time.perf_counter() - started
            if batch is end:
                return
            yield batch

    def _eval(self, test_dataloader: Any, **_: Any) -> None:
        self.engine.eval()
        batches = iter(test_dataloader)
        self._call_hooks("before_test")
        self._call_hooks("before_test_epoch")
        for _ in range(len(test_dataloader)):
            self._call_hooks("before_test_iter")
            result = self.engine.execute_schedule(batches, forward_only=True, return_loss=False)
            self._call_hooks("after_test_iter", result)
        self._call_hooks("after_test_epoch")
        self._call_hooks("after_test")

    def _exceed_max_step(self) -> bool:
        return self._max_steps is not None and self.step >= self._max_steps
