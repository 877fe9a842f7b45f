"""The training loop's metrics hook."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from common.config.plan import Plan
from common.engine.host_copy import HostCopy
from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook, ParallelMode, all_reduce
from common.errors import UserError
from common.files import Values
from common.hardware import peak_memory
from common.metrics.evaluation import Counts
from common.metrics.loggers import PROGRESS_BAR, open_loggers
from common.metrics.metrics_file import NON_FINITE
from common.resolutions import resolution_at, schedule_step


class MetricsHook(BaseHook):
    """Read the metrics of a run, and pass each record to every logger.

    `metrics_file.Record` has the fields. Only rank 0 has loggers. After an evaluation every rank
    has its metrics in the trainer's ``states["eval"]``.

    The host does not wait for a train record of a GPU: the values are on their way until the next
    record, an evaluation or a checkpoint, which write it.
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
        ``peak_samples_per_s``: by image size, empty if it is not known; ``logging``: as of
        `open_loggers`.
        """
        super().__init__(priority=0)
        self.plan = plan
        self.every = every
        self.peak_samples_per_s = peak_samples_per_s
        self.pending: PendingRecord | None = None
        self.loggers = {}
        if is_main:
            images = self.count_images(start, plan.last_step)
            self.loggers = open_loggers(folder, start, plan.last_step, images=images, **logging)

    def before_train(self, trainer: Trainer) -> None:
        self.clock = trainer.engine.on_phase = PhaseClock(trainer.device.type)
        self.noise_scale = trainer.engine.noise_scale
        self.loss = trainer.engine.total_loss
        self._restart_window(trainer)

    def _restart_window(self, trainer: Trainer) -> None:
        """Begin to count for the next train record."""
        self.loss.zero_()
        self.steps = 0
        self.untimed = 0  # those of ``steps`` that ran before this process started
        self.images = 0  # of the others
        self.at_peak = 0.0  # seconds that these would take at peak FLOP/s
        self.evaluated = 0.0  # seconds of evaluations, which are not training's time
        self.waited = trainer.data_wait
        self.clock.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's running totals for the next train record; waits for the device."""
        self._write_pending()  # a checkpoint has the records of the steps before it
        # of each step the mean, as if it had one micro-batch
        state = {"steps": self.steps, "micro_batches": self.steps, "loss": self.loss.item()}
        for name, averages in self._noise_averages().items():
            state[name] = averages.tolist()
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
        self.clock.restart()
        self.loss.fill_(loss)
        for name, averages in self._noise_averages().items():
            saved = [state.get(name) for state in states]
            if None not in saved:
                averages.copy_(torch.tensor(saved, dtype=torch.float64).mean(0))

    def _noise_averages(self) -> dict[str, Tensor]:
        """Return the averages of the noise scale, by their names in a checkpoint."""
        if not self.noise_scale:
            return {}
        averages = {"noise_scale": self.noise_scale.averages}
        if self.noise_scale.update_norms:
            averages["tensor_noise_scale"] = self.noise_scale.tensor_averages
        return averages

    def before_train_epoch(self, trainer: Trainer) -> None:
        resolutions = self.plan.resolutions
        resolution = resolution_at(resolutions, trainer.cur_epoch)
        size = resolution.image_size
        self.batch = resolution.total_batch or self.plan.total_batch
        peak = self.peak_samples_per_s.get(size)
        self.step_at_peak = self.batch / peak if peak else 0.0
        self.sizes = {}
        if len({each.image_size for each in resolutions}) > 1:
            self.sizes["image_size"] = size
        if self.plan.has_batches:
            self.sizes["batch_size"] = self.batch

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.update_done:
            return
        self.steps += 1
        self.images += self.batch
        self.at_peak += self.step_at_peak
        if self.loggers:
            before, now = self.count_images(trainer.step - 1, trainer.step) or (0, 1)
            self.loggers[PROGRESS_BAR].step(now - before)
        if trainer.step % self.every == 0 or trainer.has_ended():
            self._write_pending()
            self.pending = self._begin_record(trainer)
            self._restart_window(trainer)
            if self.pending.values.is_ready:
                self._write_pending()

    def count_images(self, *steps: int) -> tuple[int, ...] | None:
        """Return the images until each of ``steps``; None where all steps have one batch."""
        if not self.plan.has_batches:
            return None
        resolutions = self.plan.resolutions
        smallest = min(resolution.total_batch for resolution in resolutions)
        return tuple(int(schedule_step(resolutions, step) * smallest) for step in steps)

    def _begin_record(self, trainer: Trainer) -> "PendingRecord":
        """Return the train record of this step, whose values the device has yet to compute."""
        optimizer = trainer.engine.optimizer
        # Over all ranks.
        loss = all_reduce(self.loss / self.steps, ParallelMode.DATA) / self.plan.data_parallel
        values = {
            "loss": loss,
            "grad_norm": optimizer.grad_norm,
            "skipped": optimizer.counter.total,
        }
        if self.noise_scale:
            values["noise_scale"] = self.noise_scale.value()
            if self.noise_scale.update_norms:
                values["optimizer_noise_scale"] = self.noise_scale.optimizer_value()
        return PendingRecord(
            head=self._head("train", trainer),
            names=list(values),
            values=HostCopy(torch.stack([value.double() for value in values.values()])),
            marks=self.clock.restart(),
            timed=self.steps - self.untimed,
            images=self.images,
            evaluated=self.evaluated,
            at_peak=self.at_peak,
            data_wait=trainer.data_wait - self.waited,
            # The parts of a recorded step are not timed.
            has_phases=trainer.engine.graphs is None,
            further={
                "lr": trainer.learning_rate,
                **self.sizes,
                "peak_memory_gb": peak_memory() / 1e9,
            },
        )

    def _write_pending(self) -> None:
        """Log the record that `_begin_record` began, if it is not logged yet."""
        record, self.pending = self.pending, None
        if record is not None and self.loggers:
            self._log(record.finish(self.clock))

    def before_test(self, trainer: Trainer) -> None:
        if trainer.device.type == "cuda":
            # The steps in its queue are training's time. Not the device: another stream may record.
            torch.cuda.current_stream().synchronize()
        self._write_pending()
        self.paused = time.perf_counter()
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
        self._log(self._head("eval", trainer) | metrics)
        self.evaluated += time.perf_counter() - self.paused

    def log_non_finite(self, trainer: Trainer, step: int, where: Values) -> None:
        """Log that ``step`` was not finite, and ``where`` in it."""
        self._log(self._head(NON_FINITE, trainer) | {"step": step, **where})

    def _head(self, kind: str, trainer: Trainer) -> dict[str, Any]:
        """Return what every record begins with."""
        step: float = trainer.step
        if self.plan.has_batches:
            step = schedule_step(self.plan.resolutions, trainer.step)
        epoch = round(step / self.plan.steps_per_epoch, 4)
        return {"kind": kind, "step": trainer.step, "epoch": epoch, "time": round(time.time(), 2)}

    def _log(self, record: dict[str, Any]) -> None:
        for logger in self.loggers.values():
            logger(record)

    def after_train(self, trainer: Trainer) -> None:
        self._write_pending()
        for logger in self.loggers.values():
            logger.close()

    def close(self) -> None:
        """Close the loggers of a training that has failed."""
        with suppress(RuntimeError):  # of a GPU that has failed
            self._write_pending()
        for logger in self.loggers.values():
            logger.close(failed=True)


@dataclass
class PendingRecord:
    """A train record that waits for the device."""

    head: dict[str, Any]
    names: list[str]
    values: HostCopy  # of these names
    marks: "Marks"
    timed: int  # steps that ran in this process
    images: int  # of these
    evaluated: float  # seconds in evaluations
    at_peak: float  # seconds that the steps would take at peak FLOP/s
    data_wait: float  # seconds
    has_phases: bool
    further: dict[str, float]

    def finish(self, clock: "PhaseClock") -> dict[str, Any]:
        """Return the record; wait until the device has come to it."""
        values = dict(zip(self.names, self.values.read().tolist(), strict=True))
        phases = clock.measure(self.marks)
        elapsed = sum(phases.values()) - self.evaluated
        rates = {
            "samples_per_s": self.images / elapsed,
            "mfu": self.at_peak / elapsed if self.at_peak else None,
            "data_wait": self.data_wait / elapsed,
        }
        if self.has_phases:
            rates["forward_s"] = phases["forward"] / self.timed
            rates["backward_s"] = phases["backward"] / self.timed
        values["skipped"] = int(values["skipped"])
        return self.head | values | self.further | rates


# The phases that have begun, and when.
Marks = list[tuple[str, Any]]


class PhaseClock:
    """Measure the time of each phase of a step, by the calls of `Engine.on_phase`.

    On a GPU with CUDA events, which do not wait for it: it may be steps behind the host.
    """

    def __init__(self, device: str):
        self.is_cuda = device == "cuda"
        self.marks: Marks = []

    def __call__(self, phase: str) -> None:
        mark: Any = time.perf_counter()
        if self.is_cuda:
            # A recorded event has no time.
            if torch.cuda.is_current_stream_capturing():
                return
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self.marks.append((phase, mark))

    def restart(self) -> Marks:
        """End the last phase; return the marks so far, and begin anew."""
        self("rest")
        marks, self.marks = self.marks, self.marks[-1:]
        return marks

    def measure(self, marks: Marks) -> dict[str, float]:
        """Return the seconds of each phase; the device must have come to the last mark."""
        seconds = {"forward": 0.0, "backward": 0.0, "rest": 0.0}
        for (phase, start), (_, end) in pairwise(marks):
            if self.is_cuda:
                seconds[phase] += start.elapsed_time(end) / 1e3  # from ms
            else:
                seconds[phase] += end - start
        return seconds
