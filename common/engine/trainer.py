"""The training loop: epochs, optimizer steps, evaluations, and the hooks around them."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from common.engine.engine import Engine
from common.engine.lost_ranks import naming_lost_ranks, set_activity
from common.engine.step_optimizer import OncePerStep
from common.engine.tensor_parallel.sharding import broadcast_buffers
from common.engine.upstream import (
    BaseHook,
    DataParallelSampler,
    LRSchedulerHook,
    UpstreamTrainer,
)
from common.errors import AgreedError, UserError
from common.resolutions import Resolution, most_steps, resolution_at, schedule_step


class Trainer(UpstreamTrainer):
    """Upstream's trainer (legacy/trainer/_trainer.py), counting optimizer steps and able to resume.

    Differences from upstream:

    - ``max_steps`` counts optimizer steps, not micro-batches, and needs no logger (:340);
    - the last epoch is always evaluated (:328 skips it for most intervals);
    - the engine's schedule is stepped once per optimizer step, before ``after_train_iter``, unless
      an `LRSchedulerHook` does so, by step or by epoch;
    - epochs may have different numbers of steps (``resolutions``);
    - it can resume with `load_state_dict`, also in the middle of an epoch or before an evaluation;
    - hooks see each sample of an evaluation once: what `get_dataloader` repeats, so that ranks have
      equal numbers, is left out of ``output`` and ``label``;
    - it sets the activity that `Watcher` reports.

    Attributes, for hooks:
        step: optimizer steps completed; in ``after_train_iter`` including the current one.
        cur_epoch: epochs completed; ``epoch_step``: optimizer steps completed in the current epoch.
        cur_step: micro-batches completed before the current one, as in upstream.
        steps_per_epoch: optimizer steps in the current epoch.
        resolutions: the steps of each epoch, and their sizes; a hook may set it in
            ``before_train``.
        evaluated_step: the step of the last evaluation.
        update_done: whether the last micro-batch ended an optimizer step.
        learning_rate: of the last optimizer step; with layer decay, of the head.
        data_wait: seconds that this process, with a GPU the GPU, waited for the training loader.
        states: values shared between hooks, below.
        stopping: set by a hook after an optimizer step or in an evaluation to end the training.

    Keys of ``states``:
        checkpoint: path of the newest checkpoint. `CheckpointHook` sets it, errors name it.
        bad_step: what errors say of the first step that was not finite. `BadStepHook` sets it.
        eval: metrics of the last evaluation. `MetricsHook` sets it, `CheckpointHook` reads it.
        figures: further metrics, by a user's hook in an evaluation. `MetricsHook` takes them.
        metrics, step_metrics: of Colossal-AI's hooks. The progress bar shows the latter.

    Hooks are called by ``priority``, the lowest first: -1 for a new image size and for hooks that
    set ``figures``, 0 for metrics, 5 for the moving average of the weights, 10 for checkpoints,
    which hold what the others have done.
    """

    engine: Engine

    def __init__(self, engine: Engine, timer: Any = None, logger: Any = None):
        super().__init__(engine, timer=timer, logger=logger)
        self.device = engine.device
        self.step = self.epoch_step = self.evaluated_step = 0
        self.update_done = self.stopping = False
        self.learning_rate = self.data_wait = 0.0
        # No bar for an `evaluate` before `fit`.
        self._is_silent = True
        self._lr_schedules: dict[LRScheduler, bool] = {}  # values: whether it is stepped by epoch

    def state_dict(self) -> dict[str, int]:
        """Return the position of the training between two optimizer steps."""
        return {
            "step": self.step,
            "epoch": self._cur_epoch,
            "epoch_step": self.epoch_step,
            "evaluated_step": self.evaluated_step,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the position and the schedules; the caller restores the loader."""
        self.step = state["step"]
        self._cur_epoch = state["epoch"]
        self.epoch_step = state["epoch_step"]
        self.evaluated_step = state["evaluated_step"]
        # Exact if all steps so far had this many micro-batches (IMAGE_SIZES may change it).
        self._cur_step = self.step * self.engine.optimizer.accumulation
        # Epochs before a data set grew had fewer steps. As many epochs more make up for it: the
        # training ends after as many steps as the schedule has.
        full_epochs = schedule_step(self.resolutions, self.step) // most_steps(self.resolutions)
        self._max_epochs += max(0, self._cur_epoch - int(full_epochs))
        for lr_schedule, by_epoch in self._lr_schedules.items():
            done = self._cur_epoch if by_epoch else self.step
            # torch would warn of a schedule that is stepped before its optimizer.
            lr_schedule.optimizer._opt_called = True
            if isinstance(lr_schedule, LambdaLR):
                # Its rates depend on the step alone: one call suffices.
                lr_schedule.last_epoch = done - 1
            for _ in range(done - lr_schedule.last_epoch):
                lr_schedule.step()

    @naming_lost_ranks()
    def fit(
        self,
        train_dataloader: Any,
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Any = None,
        test_interval: int = 1,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Train for ``epochs`` epochs or ``max_steps`` optimizer steps, whichever ends first.

        Evaluates every ``test_interval`` epochs and at the end, on loaders from `initialize`, which
        are closed however it ends, and so are hooks that have a ``close``. Hooks are called by
        ``priority``; ``output`` and ``label`` are None without ``return_output_label``. A hook may
        load a state in ``before_train``.

        Raises:
            UserError: with the lost ranks, when a collective fails.
            AgreedError: with ``states["checkpoint"]``, when too many updates were skipped.
        """
        self._max_epochs = epochs
        self._max_steps = max_steps
        accumulation = self.engine.optimizer.accumulation
        # Micro-batches that fill no step are left out.
        steps = len(train_dataloader) // accumulation
        if not steps:
            raise UserError(
                "the training loader has fewer batches than gradient_accumulation: lower it, or "
                "the batch"
            )
        # The sizes of images and micro-batches are the loader's.
        self.resolutions: Sequence[Resolution] = [
            Resolution(epochs, 0, 0, accumulation, steps=steps)
        ]
        self.train_dataloader = train_dataloader
        self.test_dataloader = test_dataloader
        self._reset_states()
        # `sorted` is stable: hooks of equal priority keep the order in which they were given.
        self.hooks = sorted(hooks or (), key=lambda hook: hook.priority)
        self._is_silent = not self._should_display_progress(display_progress)
        self._returns_output = return_output_label
        self._collect_lr_schedules()
        try:
            self._call_hooks("after_hook_is_attached")
            self._call_hooks("before_train")
            self._run(test_interval)
            set_activity("ending")
            self._call_hooks("after_train")
        finally:
            self.stopping = False  # an evaluation or a fit may follow
            for part in (*self.hooks, train_dataloader, test_dataloader):
                # torch's `DataLoader` has no `close`.
                if hasattr(part, "close"):
                    part.close()

    @property
    def steps_per_epoch(self) -> int:
        return resolution_at(self.resolutions, self._cur_epoch).steps

    def end_here(self) -> None:
        """End the training at this step, as if it were the last; for hooks."""
        self._max_steps = self.step

    def _collect_lr_schedules(self) -> None:
        """List the schedules to resume; let those of hooks act once per optimizer step."""
        own = getattr(self.engine.lr_scheduler, "lr_schedule", None)
        self._lr_schedules = {own: False} if own else {}
        self._stepped_by_hook = False
        for hook in self.hooks:
            if isinstance(hook, LRSchedulerHook):
                lr_schedule = getattr(hook.lr_scheduler, "lr_schedule", hook.lr_scheduler)
                hook.lr_scheduler = OncePerStep(lr_schedule, self.engine.optimizer)
                self._lr_schedules[lr_schedule] = hook.by_epoch
                self._stepped_by_hook = True

    def _run(self, test_interval: int) -> None:
        """Train and evaluate until the end, or until a hook sets ``stopping``."""
        if self.epoch_step >= self.steps_per_epoch:
            # The data set of a resumed run has shrunk: the loader starts the next epoch.
            self._cur_epoch += 1
            self.epoch_step = 0
        try:
            while not self.stopping:
                # First, as a resumed run may have been stopped between a step and its evaluation.
                if self.test_dataloader is not None and self._is_evaluation_due(test_interval):
                    self._eval(self.test_dataloader)
                elif self.has_ended():
                    break
                else:
                    self._train_epoch(self.train_dataloader)
        except AgreedError as error:
            checkpoint = self.states.get("checkpoint")
            last = f"the last checkpoint is {checkpoint}"
            saved = last if checkpoint else "no checkpoint was saved yet"
            bad_step = self.states.get("bad_step", "")
            raise AgreedError(f"{error}; {saved}{bad_step}") from error

    def _train_epoch(self, train_dataloader: Any) -> None:
        """Train for the rest of an epoch."""
        self.engine.train()
        batches = self._timed(train_dataloader)
        epoch = self._cur_epoch
        self._call_hooks("before_train_epoch")
        self._call_timer("start", "Train-epoch")
        bar = tqdm(
            desc=f"[Epoch {epoch + 1} / Train]",
            total=self.steps_per_epoch,
            initial=self.epoch_step,
            disable=self._is_silent,
        )
        # `_count_step` advances the epoch.
        while self._cur_epoch == epoch and not (self.stopping or self.has_ended()):
            self._train_step(batches)
            bar.update()
            # Upstream's LogMetricByStepHook sets it.
            bar.set_postfix(self.states.get("step_metrics"))
        bar.close()
        self._call_timer("stop", "Train-epoch", keep_in_history=True)
        self._call_hooks("after_train_epoch")

    def _train_step(self, batches: Iterator[Any]) -> None:
        """Train for an optimizer step; call the hooks before and after each micro-batch."""
        accumulation = self.engine.optimizer.accumulation
        # A generator: `next` trains on a micro-batch, and updates after the last.
        results = self.engine.train_step(batches, self._returns_output)
        for number in range(1, accumulation + 1):
            set_activity(f"step {self.step + 1}: waiting for data")
            self._call_hooks("before_train_iter")
            self._call_timer("start", "Train-step")
            result = next(results)
            self._call_timer("stop", "Train-step", keep_in_history=True)
            set_activity(f"step {self.step + 1}: hooks after the step")
            self.update_done = number == accumulation
            if self.update_done:
                self._count_step()
            self._call_hooks("after_train_iter", result)
            # After the hooks: as in upstream, they see the number of micro-batches before.
            self._cur_step += 1

    def _count_step(self) -> None:
        """Count an optimizer step, and the epoch that it ends; step the engine's schedule."""
        self.step += 1
        self.epoch_step += 1
        if self.epoch_step == self.steps_per_epoch:
            self._cur_epoch += 1
            self.epoch_step = 0
        # Read before the schedule sets the next step's rate.
        self.learning_rate = max(group["lr"] for group in self.engine.optimizer.param_groups)
        if self.engine.lr_scheduler is not None and not self._stepped_by_hook:
            self.engine.lr_scheduler.step()

    def _timed(self, dataloader: Any) -> Iterator[Any]:
        """Yield the batches; add the time that each takes to ``data_wait``.

        A GPU that is still busy when the batch is there has not waited: the host was ahead of it.
        """
        batches = iter(dataloader)
        launched = torch.cuda.Event() if self.device.type == "cuda" else None
        end = object()  # a loader may yield None
        while True:
            if launched is not None:
                launched.record()
            started = time.perf_counter()
            batch = next(batches, end)
            if launched is None or launched.query():
                self.data_wait += time.perf_counter() - started
            if batch is end:
                return
            set_activity(f"step {self.step + 1}: forward and backward")
            yield batch

    def _eval(self, test_dataloader: Any, **unused: Any) -> None:
        """Evaluate on a loader; ``unused`` is what upstream's `evaluate` passes."""
        self.engine.eval()
        activity = f"evaluating after step {self.step}"
        returns_loss = self._returns_test_loss()
        batches = iter(test_dataloader)
        unpadded = _count_unpadded(test_dataloader)
        self._call_hooks("before_test")
        # Each rank's batch norms have seen different images: all evaluate with rank 0's statistics.
        broadcast_buffers(self.engine.model)
        self._call_hooks("before_test_epoch")
        self._call_timer("start", "Test-epoch")
        bar = tqdm(
            range(len(test_dataloader)),
            desc=f"[Epoch {self._cur_epoch} / Test]",
            disable=self._is_silent,
        )
        for _ in bar:
            set_activity(f"{activity}: waiting for data")
            self._call_hooks("before_test_iter")
            batch = next(batches)
            set_activity(f"{activity}: forward")
            unpadded = self._test_step(batch, returns_loss, unpadded)
            if self.stopping:  # A resumed run repeats the evaluation.
                return
        self.evaluated_step = self.step
        self._call_timer("stop", "Test-epoch", keep_in_history=True)
        set_activity(f"{activity}: summing metrics")
        self._call_hooks("after_test_epoch")
        self._call_hooks("after_test")

    def _test_step(self, batch: Any, returns_loss: bool, unpadded: int) -> int:
        """Evaluate a batch, of which ``unpadded`` samples at most count; return those left."""
        schedule = self.engine.schedule
        self._call_timer("start", "Test-step")
        result = self.engine.execute_schedule(
            iter([batch]), forward_only=True, return_loss=returns_loss
        )
        self._call_timer("stop", "Test-step", keep_in_history=True)
        size = schedule.batch_size
        # Upstream's hooks read the number of samples from the schedule.
        schedule.batch_size = max(0, min(size, unpadded))
        if schedule.batch_size < size:
            output, label, loss = result
            result = *_first_samples((output, label), schedule.batch_size, size), loss
        self._call_hooks("after_test_iter", result)
        return unpadded - size

    def _returns_test_loss(self) -> bool:
        """Return whether a hook needs the loss of an evaluation, or none says."""
        wishes = [hook.needs_test_loss for hook in self.hooks if hasattr(hook, "needs_test_loss")]
        return any(wishes or [True]) and self.engine.criterion is not None

    def _is_evaluation_due(self, interval: int) -> bool:
        # `_count_step` has set `epoch_step` back to 0 where an epoch ended.
        ends_epoch = self.epoch_step == 0 and self._cur_epoch % interval == 0
        return self.step > self.evaluated_step and (ends_epoch or self.has_ended())

    def has_ended(self) -> bool:
        """Return whether the last step is done."""
        return self._cur_epoch >= self._max_epochs or (
            self._max_steps is not None and self.step >= self._max_steps
        )


def _count_unpadded(loader: Any) -> int:
    """Return how many of this rank's samples come before those that are repeated as padding."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DataParallelSampler):
        return sys.maxsize
    # Ranks take turns. Positions beyond the data set's length repeat its first samples.
    return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))


def _first_samples(tensors: Any, count: int, size: int) -> Any:
    """Return the first ``count`` samples of each tensor of ``size`` samples."""
    return tree_map_only(Tensor, lambda t: t[:count] if t.ndim and len(t) == size else t, tensors)
