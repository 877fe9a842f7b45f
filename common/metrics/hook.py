"""The training loop's metrics hook."""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.colossal import BaseHook, ParallelMode, Trainer, all_reduce
from common.config.plan import Plan
from common.hardware import peak_memory
from common.metrics.loggers import open_loggers


class MetricsHook(BaseHook):
    """Read each metric of the run once, and pass it to every logger; only rank 0 has loggers.

    A ``train`` record covers the optimizer steps since the previous one: mean ``loss``; ``lr`` and
    ``grad_norm`` (before clipping) of the last step; ``skipped``, the total of updates skipped
    because of non-finite values; ``samples_per_s`` over all GPUs; ``mfu``, its ratio to
    ``peak_samples_per_s``; ``data_wait``, the fraction of time that this process waited for its
    loader; ``forward_s`` and ``backward_s``, seconds of a step in the forward passes with the loss
    and in the backward passes; ``peak_memory_gb`` of this process (on a GPU only PyTorch's
    allocator, without DALI's buffers). An ``eval`` record counts every sample of the evaluation set
    once: mean cross-entropy ``loss``, ``top1`` and ``top5`` (0 to 1), ``samples``. Both have
    ``step`` (optimizer step), ``epoch`` (fractional) and ``time`` (Unix, seconds). Every rank has
    the last evaluation's metrics in the trainer's ``states["eval"]``.

    The device is synchronised only for a record.
    """

    needs_test_loss = False  # which is training's criterion: this one takes cross-entropy

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        every: int,
        tensorboard: bool,
        trackers: Sequence[str],
        is_main: bool,
        peak_samples_per_s: float,
        start: int = 0,
    ):
        """``start``: optimizer steps completed before."""
        super().__init__(priority=0)
        self.plan, self.every, self.peak_samples_per_s = plan, every, peak_samples_per_s
        self.has_shown_loss = False
        self.loggers = []
        if is_main:
            self.loggers = open_loggers(
                folder, start, plan.last_step, tensorboard=tensorboard, trackers=trackers
            )

    def before_train(self, trainer: Trainer) -> None:
        self.clock = trainer.engine.on_phase = PhaseClock(trainer.device.type)
        self._restart_window(trainer)

    def _restart_window(self, trainer: Trainer) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=trainer.device)
        self.micro_batches = self.untimed = 0
        self.started, self.waited = time.perf_counter(), trainer.data_wait

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's running totals for the next train record; waits for the device."""
        steps = self.micro_batches // self.plan.accumulation
        return {"steps": steps, "micro_batches": self.micro_batches, "loss": self.loss.item()}

    def load_state_dict(self, states: Sequence[Mapping[str, float]], rank: int | None) -> None:
        """Resume from the states of all ranks: from that of ``rank``, or from their mean if it is
        None.
        """
        states = states if rank is None else [states[rank]]
        steps, micro_batches, loss = states[0].values()
        if steps and (
            rank is None or micro_batches != steps * self.plan.accumulation
        ):  # of another size
            mean = fmean(state["loss"] / state["micro_batches"] for state in states)
            micro_batches = steps * self.plan.accumulation
            loss = mean * micro_batches
        self.micro_batches = self.untimed = micro_batches
        self.started = time.perf_counter()
        self.loss.fill_(loss)

    def after_train_iter(
        self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor
    ) -> None:
        self.loss += loss.detach()
        self.micro_batches += 1
        if not trainer.update_done:
            return
        has_record = trainer.step % self.every == 0 or trainer.step == self.plan.last_step
        shown = (
            None if has_record or self.has_shown_loss else self._mean_loss()
        )  # show one immediately
        self.has_shown_loss = True
        if self.loggers:
            self.loggers[-1].step(shown)  # the progress bar
        if has_record:
            self._log("train", trainer, self._train_figures(trainer))
            self._restart_window(trainer)

    def _mean_loss(self) -> float:
        return (
            all_reduce(self.loss / self.micro_batches, ParallelMode.DATA).item()
            / self.plan.data_parallel
        )

    def _train_figures(self, trainer: Trainer) -> dict:
        loss = self._mean_loss()
        elapsed, timed = time.perf_counter() - self.started, self.micro_batches - self.untimed
        samples_per_s = timed * self.plan.micro_batch * self.plan.data_parallel / elapsed
        phases = self.clock.read()  # the loss has waited for the device
        return {
            "loss": loss,
            "lr": trainer.learning_rate,
            "grad_norm": trainer.engine.optimizer.grad_norm.item(),
            "skipped": trainer.engine.optimizer.skipped,
            "samples_per_s": samples_per_s,
            "mfu": samples_per_s / self.peak_samples_per_s,
            "data_wait": (trainer.data_wait - self.waited) / elapsed,
            "forward_s": phases["forward"] * self.plan.accumulation / timed,
            "backward_s": phases["backward"] * self.plan.accumulation / timed,
            "peak_memory_gb": peak_memory() / 1e9,
        }

    def before_test(self, trainer: Trainer) -> None:
        if trainer.device.type == "cuda":  # whose queued steps are training's time
            torch.cuda.synchronize()
        self.paused = time.perf_counter()
        self.totals = torch.zeros(
            4, dtype=torch.float64, device=trainer.device
        )  # loss, top-1, top-5, samples

    def after_test_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: None) -> None:
        self.totals += count_correct(output, label)

    def after_test(self, trainer: Trainer) -> None:
        loss, top1, top5, samples = all_reduce(self.totals, ParallelMode.DATA).tolist()
        metrics = {
            "loss": loss / samples,
            "top1": top1 / samples,
            "top5": top5 / samples,
            "samples": int(samples),
        }
        metrics |= trainer.states.pop("figures", {})  # of a hook of the user's
        trainer.states["eval"] = metrics
        self._log("eval", trainer, metrics)
        self.started += time.perf_counter() - self.paused

    def _log(self, kind: str, trainer: Trainer, metrics: dict) -> None:
        epoch = round(trainer.step / self.plan.steps_per_epoch, 4)
        when = {"kind": kind, "step": trainer.step, "epoch": epoch, "time": round(time.time(), 2)}
        for logger in self.loggers:
            logger(when | metrics)

    def after_train(self, trainer: Trainer) -> None:
        for logger in self.loggers:
            logger.close()


def count_correct(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
    """Return [sum of cross-entropy, top-1 hits, top-5 hits, samples], float64; labels of -100 are
    ignored.
    """
    valid_B = labels_B >= 0
    loss = F.cross_entropy(logits_BC.float(), labels_B, reduction="sum")
    hits_BK = best_classes(logits_BC) == labels_B[:, None]
    return torch.stack([loss.double(), hits_BK[:, 0].sum(), hits_BK.sum(), valid_B.sum()])


def best_classes(logits_BC: Tensor) -> Tensor:
    """Return the five most probable classes [B, K], K <= 5; -1 where the logits give no
    probabilities (NaN).
    """
    logits_BC = logits_BC.float()
    best_BK = logits_BC.topk(min(5, logits_BC.shape[1])).indices
    return best_BK.where(logits_BC.logsumexp(1, keepdim=True).isfinite(), -1)


class PhaseClock:
    """Add up the seconds between the beginnings of a step's phases, as `Engine.on_phase` names
    them.

    On a GPU by CUDA events, which do not wait for it.
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
        """Return the seconds by phase since the last call; the device must have finished its
        work.
        """
        seconds = {"forward": 0.0, "backward": 0.0, "rest": 0.0}
        for (phase, start), (_, end) in pairwise(self.marks):
            seconds[phase] += start.elapsed_time(end) / 1e3 if self.is_cuda else end - start
        self.marks.clear()
        return seconds
