"""The hook that saves checkpoints during training, and that stops and resumes a run."""

import json
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from common.checkpoint.content import (
    CONFIG,
    METRICS,
    RANDOM,
    TRAINER,
    VERSION,
    Tensors,
    read_metadata,
    read_tensors,
    read_trainer_state,
)
from common.checkpoint.save import (
    checkpoint_path,
    clear_old,
    full_state_dict,
    load_full_state_dict,
    mark_best,
    newest_checkpoint,
    write_checkpoint,
)
from common.engine.collectives import ask_first_rank, gather
from common.engine.engine import TrainLoader
from common.engine.groups import generator_states, set_generator_states
from common.engine.lost_ranks import set_activity
from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook, ParallelMode, gpc
from common.errors import UserError
from common.files import Values
from common.launch.signals import stop_signals
from common.metrics.evaluation import Best, rank_evaluation
from common.metrics.hook import MetricsHook
from common.metrics.loggers import warn


@dataclass(eq=False)
class CheckpointHook(BaseHook):
    """Save every ``every`` optimizer steps (an int) or minutes ("10 min"), and at the end.

    It also saves after an evaluation that is the best so far, by BEST. The newest ``keep``
    checkpoints stay, and the best. PATIENCE evaluations without a new best end the training.

    The training loop waits for a copy of the weights and the optimizer's state; a thread of rank 0
    writes it. A failed write is reported, and training continues; if it is the last one, the run
    ends with `UserError`.

    A signal that any rank has received ends the training of all ranks after the same step. The
    ranks exchange signals, and saves that are due by minutes, after every step without waiting, and
    act on them a step later.
    """

    folder: Path
    model: nn.Module
    optimizer: Optimizer
    metrics: MetricsHook
    _: KW_ONLY
    metadata: Values  # the content of config.json
    every: int | str
    keep: int
    start_from: Path | None  # the checkpoint to resume from
    averages: Mapping[str, Tensor] | None  # those of `EmaHook`

    def __post_init__(self):
        super().__init__(priority=10)  # after the step's metrics are written
        # If these are equal, a rank does the same work and draws the same random numbers as before.
        self.ranks = {
            "gpus": self.metadata["plan"]["gpus"],
            "parallel": self.metadata["config"]["parallel"],
        }
        self.every_steps = math.inf
        self.every_seconds = math.inf
        if isinstance(self.every, int):
            self.every_steps = self.every
        else:
            # "10 min": the schema has checked the text.
            self.every_seconds = 60 * float(self.every.partition("min")[0])
        self.best = Best()
        self.stale = 0  # evaluations since the best
        self.is_defined = True  # whether the last evaluation could be the best
        self.saved: dict[str, int] = {}  # the trainer's state at the last save
        # The wall clock may be set back, which would delay the next save.
        self.saved_at = time.monotonic()
        # One thread: checkpoints are written in the order of their steps.
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self.writing: Future[None] | None = None
        # the all-reduce of flags that began after the last step
        self.exchange: tuple[Tensor, dist.Work] | None = None

    @property
    def stable_end(self) -> int:
        """The step at the end of a stable phase; 0: the schedule has none.

        Branches begin there, or before.
        """
        plan = self.metrics.plan
        return plan.count_steps(plan.decay_start) if plan.decay_steps else 0

    def before_train(self, trainer: Trainer) -> None:
        if not isinstance(trainer.train_dataloader, TrainLoader):
            raise UserError(
                "the training loader has no state_dict and load_state_dict, which a checkpoint "
                "needs: add them as in docs/library.md, or train without CheckpointHook"
            )
        if self.start_from is not None:
            set_activity("loading the checkpoint")
            self._load(self.start_from, trainer)
            self.saved = trainer.state_dict()
            trainer.states["checkpoint"] = self.start_from
        # Until here a signal ended the process: there was nothing to save.
        stop_signals.deferring = True

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        if trainer.update_done and self._agree(trainer, trainer.step):
            self._save(trainer)

    def after_test_iter(self, trainer: Trainer, *_: Any) -> None:
        self._agree(trainer)

    def after_test(self, trainer: Trainer) -> None:
        config = self.metadata["config"]
        reached = rank_evaluation(trainer.states["eval"], config["BEST"])
        self._warn_if_undefined(trainer, reached)
        self._finish_write()
        # rank 0 alone knows whether the best so far was written
        if ask_first_rank(lambda: reached > self.best):
            self.stale = 0
            self._save(trainer, reached)
            return
        self.stale += 1
        if self.stale >= (config["PATIENCE"] or math.inf):
            # as of a run that was to end here, for what reads config.json
            self.metadata["plan"]["last_step"] = trainer.step
            trainer.end_here()

    def _warn_if_undefined(self, trainer: Trainer, reached: Best) -> None:
        """Warn of the first of several evaluations that cannot be the best."""
        was_defined = self.is_defined
        self.is_defined = reached != Best()
        if self.is_defined or not was_defined or gpc.get_global_rank() > 0:
            return
        metric = self.metadata["config"]["BEST"]
        figures = trainer.states["eval"]
        value = figures.get("score", figures.get(metric))
        remedy = "; AUROC needs images of both classes" if metric == "auroc" else ""
        warn(
            f"no checkpoint counts as the best at step {trainer.step}: BEST={metric!r} is {value}, "
            f"the loss {figures['loss']:.4f}{remedy}"
        )

    def after_train(self, trainer: Trainer) -> None:
        self._finish_exchange()
        # The last step, or a run that was resumed at its end, may be saved already.
        if trainer.step and self.saved != trainer.state_dict():
            self._save(trainer)
        set_activity("writing the last checkpoint")
        # no rank leaves before the write is done: the launcher would kill rank 0
        ask_first_rank(self.wait)
        stop_signals.deferring = trainer.stopping  # a stopped run ends normally

    def _agree(self, trainer: Trainer, step: int | None = None) -> bool:
        """Decide, equally on all ranks, whether to stop; return whether to save after ``step``.

        With several ranks the answer is one step old: the all-reduce started in the previous call.
        In an evaluation, without ``step``, it is of now: the run may do nothing after it.
        """
        is_due = time.monotonic() - self.saved_at >= self.every_seconds
        # [2]: the number of a signal, or 0, and whether a save is due; combined by MAX.
        flags = torch.tensor([stop_signals.received, is_due])
        if gpc.get_world_size(ParallelMode.GLOBAL) > 1:
            agreed = self._finish_exchange()
            if agreed[1]:  # it is saved now, or asked for again after the evaluation
                flags[1] = 0
            group = gpc.get_cpu_group(ParallelMode.GLOBAL)
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group, async_op=True)
            # The tensor has to live until `wait`: gloo writes into it meanwhile.
            self.exchange = flags, work
            flags = agreed if step is not None else agreed.maximum(self._finish_exchange())
        stop_signals.agreed = int(flags[0])
        trainer.stopping |= stop_signals.agreed != 0
        # `step % inf` is never 0. In an evaluation, without a step, nobody reads the result.
        return bool(flags[1]) or step == self.stable_end or (step or 1) % self.every_steps == 0

    def _finish_exchange(self) -> Tensor:
        """Return the flags that the ranks exchanged last; zeros before the first exchange."""
        if self.exchange is None:
            return torch.zeros(2, dtype=torch.int64)
        flags, work = self.exchange
        self.exchange = None
        work.wait()
        return flags

    def _save(self, trainer: Trainer, best: Best | None = None) -> None:
        """Copy the state on all ranks, after the write before; rank 0's thread writes it.

        ``best`` is the evaluation just done, if it is the best so far.
        """
        set_activity("saving a checkpoint")
        self._finish_write()
        content: dict[str, Tensors | bytes] = {
            **full_state_dict(self.model, self.optimizer, self.averages)
        }
        # Each rank draws its own masks and has its own running loss.
        states = gather({"random": generator_states(), "metrics": self.metrics.state_dict()})
        self.saved = trainer.state_dict()
        self.saved_at = time.monotonic()
        # The other ranks were needed to gather, and rank 0 alone writes.
        if gpc.get_global_rank() > 0:
            return
        newest_best = best or self.best
        state = {
            "version": VERSION,
            "trainer": self.saved,
            "loader": trainer.train_dataloader.state_dict(),
            "optimizer": trainer.engine.optimizer.step_state(),
            "metrics": [rank_state["metrics"] for rank_state in states],
            "best_top1": newest_best.score,
            "best_loss": -newest_best.negative_loss,
            "stale": self.stale,
            "ranks": self.ranks,
        }
        content[RANDOM] = {
            f"{rank}/{name}": generator
            for rank, rank_state in enumerate(states)
            for name, generator in rank_state["random"].items()
        }
        content[TRAINER] = json.dumps(state, indent=2).encode()
        content[CONFIG] = json.dumps(self.metadata, indent=2, default=str).encode()
        # Read here, not in the thread: what is logged meanwhile is of later steps.
        metrics = self.folder.parent / METRICS
        content[METRICS] = metrics.read_bytes() if metrics.exists() else b""
        path = checkpoint_path(self.folder, self.saved["step"])
        self.writing = self.writer.submit(self._write_checkpoint, trainer, path, content, best)

    def _write_checkpoint(
        self,
        trainer: Trainer,
        path: Path,
        content: dict[str, Tensors | bytes],
        best: Best | None,
    ) -> None:
        """Write ``content`` in the thread; ``best`` as in `_save`."""
        try:
            write_checkpoint(path, content)
            trainer.states["checkpoint"] = path
            if best:
                mark_best(path)
                # Only now: after a failed write, an equal evaluation is the best too.
                self.best = best
            clear_old(path, self.keep, self.stable_end)
        # safetensors raises its own error for an OSError
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            newest = newest_checkpoint(self.folder) or "none"
            raise UserError(
                f"{path} could not be written ({reason}); the newest checkpoint is {newest}"
            ) from error

    def _finish_write(self) -> None:
        """Wait for the last write; warn if it failed."""
        try:
            self.wait()
        except UserError as error:
            warn(f"{error}; training continues")

    def wait(self) -> None:
        """Wait for the last write; raise `UserError` if it failed."""
        writing = self.writing
        self.writing = None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """End the thread, once it has written what it is at."""
        self.writer.shutdown()

    def _load(self, path: Path, trainer: Trainer) -> None:
        """Restore what the checkpoint ``path`` holds."""
        parts = self.model, self.optimizer, self.averages, self.metrics
        state, _ = load_checkpoint(path, trainer, self.ranks, *parts)
        then = read_metadata(path)
        is_same_data = then["data"]["fingerprint"] == self.metadata["data"]["fingerprint"]
        # earlier versions compare top-1
        is_same_metric = then["config"].get("BEST", "top1") == self.metadata["config"]["BEST"]
        # a branch marks its own best, and figures of different data or metrics do not compare
        if path.parent == self.folder and is_same_data and is_same_metric:
            self.best = Best(state["best_top1"], -state["best_loss"])
            self.stale = state["stale"]


def load_checkpoint(
    path: Path,
    trainer: Trainer,
    ranks: Values,
    model: nn.Module,
    optimizer: Optimizer,
    averages: Mapping[str, Tensor] | None,
    metrics: MetricsHook,
) -> tuple[Values, bool]:
    """Restore a training from the checkpoint ``path``.

    Returns trainer.json, and whether ``ranks``, its field, are as then: each rank then does the
    same work as before and draws the same random numbers.
    """
    state = read_trainer_state(path)
    load_full_state_dict(path, model, optimizer, averages)
    trainer.load_state_dict(state["trainer"])
    trainer.train_dataloader.load_state_dict(state["loader"])
    trainer.engine.optimizer.load_step_state(state["optimizer"])
    rank = gpc.get_global_rank()
    if any(state["ranks"][key] != value for key, value in ranks.items()):
        # Masks of dropout and drop_path, and draws per micro-batch (Mixup), will differ: the
        # generators stay as `initialize` seeded them.
        metrics.load_state_dict(state["metrics"], None)
        return state, False
    metrics.load_state_dict(state["metrics"], rank)
    generators = read_tensors(path / RANDOM)
    prefix = f"{rank}/"
    set_generator_states(
        {
            name.removeprefix(prefix): generator
            for name, generator in generators.items()
            if name.startswith(prefix)
        }
    )
    return state, True
