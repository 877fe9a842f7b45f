"""The training loop's metrics hook."""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from common.config.plan import Plan
from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook, ParallelMode, all_reduce
from common.errors import UserError
from common.files import Values
from common.hardware import peak_memory
from common.metrics.evaluation import Counts
from common.metrics.loggers import PROGRESS_BAR, open_loggers
from common.resolutions import resolution_at


class MetricsHook(BaseHook):
    """Read the metrics of a run, and pass each record to every logger.

    `metrics_file.Record` has the fields. Only rank 0 has loggers. After an evaluation every rank
    has its metrics in the trainer's ``states["eval"]``. The device is synchronised only for a
    record.
    """

    # an evaluation's loss is the cross-entropy, whatever the criterion of training
    needs_test_loss = False

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        every: int,
        is_main: bool,
        peak_samples_per_s: Mapping[int, float],
        start: int = 0,
        **logging: Any,
    ):
        """Open the loggers on rank 0, where ``is_main``.

        ``every``: steps between two train records; ``start``: optimizer steps completed before;
        ``peak_samples_per_s``: by image size; ``logging``: as of `open_loggers`.
        """
        super().__init__(priority=0)
        self.plan = plan
        self.every = every
        self.peak_samples_per_s = peak_samples_per_s
        self.loggers = {}
        if is_main:
            self.loggers = open_loggers(folder, start, plan.last_step, **logging)

    def before_train(self, trainer: Trainer) -> None:
        self.clock = trainer.engine.on_phase = PhaseClock(trainer.device.type)
        self.noise_scale = trainer.engine.noise_scale
        self._restart_window(trainer)

    def _restart_window(self, trainer: Trainer) -> None:
        """Begin to count for the next train record."""
        self.loss = torch.zeros((), dtype=torch.float64, device=trainer.device)
        self.steps = 0
        self.untimed = 0  # those of ``steps`` that ran before this process started
        self.at_peak = 0.0  # seconds that the others would take at peak FLOP/s
        self.started = time.perf_counter()
        self.waited = trainer.data_wait

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's running totals for the next train record; waits for the device."""
        # of each step the mean, as if it had one micro-batch
        state = {"steps": self.steps, "micro_batches": self.steps, "loss": self.loss.item()}
        if self.noise_scale:
            state["noise_scale"] = self.noise_scale.averages.tolist()
        return state

    def load_state_dict(self, states: Sequence[Values], rank: int | None) -> None:
        """Resume from the state of ``rank``, or from the mean of all ``states`` if it is None."""
        states = states if rank is None else [states[rank]]
        first = states[0]
        self.steps = self.untimed = first["steps"]
        loss = first["loss"]
        # of other ranks, or of an earlier version, which sums micro-batches, the mean loss is known
        if self.steps and (rank is None or self.steps != first["micro_batches"]):
            loss = self.steps * fmean(state["loss"] / state["micro_batches"] for state in states)
        self.started = time.perf_counter()
        self.loss.fill_(loss)
        averages = [state.get("noise_scale") for state in states]
        if self.noise_scale and None not in averages:
            mean = torch.tensor(averages, dtype=torch.float64).mean(0)
            self.noise_scale.averages.copy_(mean)

    def before_train_epoch(self, trainer: Trainer) -> None:
        size = resolution_at(self.plan.resolutions, trainer.cur_epoch).image_size
        self.step_at_peak = self.plan.total_batch / self.peak_samples_per_s[size]
        self.size = {"image_size": size} if len(self.plan.resolutions) > 1 else {}

    def after_train_iter(
        self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor
    ) -> None:
        # Added on the device: `item` here would wait for it in every micro-batch.
        self.loss += loss.detach() / trainer.engine.optimizer.accumulation
        if not trainer.update_done:
            return
        self.steps += 1
        self.at_peak += self.step_at_peak
        if self.loggers:
            self.loggers[PROGRESS_BAR].step()
        if trainer.step % self.every == 0 or trainer.step == self.plan.last_step:
            self._log("train", trainer, self._train_figures(trainer))
            self._restart_window(trainer)

    def _train_figures(self, trainer: Trainer) -> dict[str, float]:
        """Return the metrics of a train record."""
        # Over all ranks. First, as the times below are of a device that has finished.
        loss = all_reduce(self.loss / self.steps, ParallelMode.DATA).item()
        elapsed = time.perf_counter() - self.started
        timed = self.steps - self.untimed
        phases = self.clock.read()
        noise_scale = {}
        if self.noise_scale:
            noise_scale["noise_scale"] = self.noise_scale.value().item()
        return {
            "loss": loss / self.plan.data_parallel,
            "lr": trainer.learning_rate,
            "grad_norm": trainer.engine.optimizer.grad_norm.item(),
            **noise_scale,
            **self.size,
            "skipped": trainer.engine.optimizer.skipped,
            "samples_per_s": timed * self.plan.total_batch / elapsed,
            "mfu": self.at_peak / elapsed,
            "data_wait": (trainer.data_wait - self.waited) / elapsed,
            "forward_s": phases["forward"] / timed,
            "backward_s": phases["backward"] / timed,
            "peak_memory_gb": peak_memory() / 1e9,
        }

    def before_test(self, trainer: Trainer) -> None:
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()  # the steps in its queue are training's time
        self.paused = time.perf_counter()  # an evaluation does not count as training's time
        self.counts = Counts(trainer.device)

    def after_test_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: None) -> None:
        self.counts.add(output, label)

    def after_test(self, trainer: Trainer) -> None:
        metrics = self.counts.sum_over_ranks(ParallelMode.DATA)
        for name, value in trainer.states.pop("figures", {}).items():  # of a hook of the user's
            try:
                metrics[name] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UserError(f"figures: {name} is not a number: {error}") from error
        trainer.states["eval"] = metrics
        self._log("eval", trainer, metrics)
        self.started += time.perf_counter() - self.paused

    def _log(self, kind: str, trainer: Trainer, metrics: dict[str, float]) -> None:
        epoch = round(trainer.step / self.plan.steps_per_epoch, 4)
        when = {"kind": kind, "step": trainer.step, "epoch": epoch, "time": round(time.time(), 2)}
        for logger in self.loggers.values():
            logger(when | metrics)

    def after_train(self, trainer: Trainer) -> None:
        for logger in self.loggers.values():
            logger.close()

    def close(self) -> None:
        """Close the loggers of a training that has failed."""
        for logger in self.loggers.values():
            logger.close(failed=True)


class PhaseClock:
    """Measure the time of each phase of a step, by the calls of `Engine.on_phase`.

    On a GPU with CUDA events, which do not wait for it.
    """

    def __init__(self, device: str):
        self.is_cuda = device == "cuda"
        self.marks: list[tuple[str, Any]] = []

    def __call__(self, phase: str) -> None:
        mark: Any = time.perf_counter()
        if self.is_cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self.marks.append((phase, mark))

    def read(self) -> dict[str, float]:
        """Return the seconds by phase since the last call; the device must have finished."""
        seconds = {"forward": 0.0, "backward": 0.0, "rest": 0.0}
        for (phase, start), (_, end) in pairwise(self.marks):
            if self.is_cuda:
                seconds[phase] += start.elapsed_time(end) / 1e3  # from ms
            else:
                seconds[phase] += end - start
        self.marks.clear()
        return seconds
