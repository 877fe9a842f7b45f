"""The hook that saves checkpoints during training, and stops and resumes a run."""

import json
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from common.checkpoint.content import (
    CONFIG,
    METRICS,
    RANDOM,
    TRAINER,
    read_about,
    read_trainer_state,
)
from common.checkpoint.save import (
    Tensors,
    checkpoint_path,
    clear_old,
    full_state_dict,
    load_full_state_dict,
    mark_best,
    newest_checkpoint,
    write_checkpoint,
)
from common.engine.collectives import ask_first_rank, gather
from common.engine.groups import generator_states, set_generator_states
from common.engine.lost_ranks import doing
from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook, ParallelMode, gpc
from common.errors import RankError, UserError
from common.launch.signals import stop_signals
from common.metrics.hook import MetricsHook
from common.metrics.loggers import warn


class CheckpointHook(BaseHook):
    """Save every ``every`` optimizer steps (an int) or minutes ("10 min"), after a better
    evaluation, and at the end.

    The training loop waits for a copy of the weights and the optimizer's state; a thread of rank 0
    writes it. A write that fails is reported, and training continues; if it is the last one, the
    run ends with `UserError`. The newest ``keep`` checkpoints stay, and the best. A signal that any
    rank has received ends the training of all ranks after the same step. Ranks exchange this after
    every step without waiting, and act on it a step later. They agree in the same way on saves that
    are due by minutes.

    ``start_from`` is the checkpoint to resume from; ``about`` what config.json holds; ``averages``
    those of `EmaHook`.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: Optimizer,
        metrics: MetricsHook,
        *,
        about: Mapping[str, Any],
        every: int | str,
        keep: int,
        start_from: Path | None,
        averages: Mapping[str, Tensor] | None,
    ):
        super().__init__(priority=10)  # after the step's metrics are written
        self.averages = averages
        self.folder, self.model, self.optimizer, self.metrics = folder, model, optimizer, metrics
        self.about, self.keep, self.start_from = about, keep, start_from
        # where these are equal, ranks do the same work and draw the same random numbers
        self.ranks = {"gpus": about["plan"]["gpus"], "parallel": about["config"]["parallel"]}
        self.every_steps = every if isinstance(every, int) else math.inf
        self.every_seconds = (
            math.inf if isinstance(every, int) else 60 * float(every.partition("min")[0])
        )
        self.buffers: dict[str, Tensors] = {}  # the writer's
        self.best = (
            -1.0,
            0.0,
        )  # top-1 or the user's score, and minus the loss, which decides between equal ones
        self.saved: dict[str, int] = {}  # where the trainer stood
        self.saved_at = time.monotonic()
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self.writing: Future[None] | None = None
        self.exchange: tuple[Tensor, dist.Work] | None = (
            None  # of flags between ranks, begun after the last step
        )

    def before_train(self, trainer: Trainer) -> None:
        if not hasattr(trainer.train_dataloader, "state_dict"):
            raise UserError(
                "the training loader has no state_dict and load_state_dict, which a checkpoint "
                "needs: "
                "add them as in docs/library.md, or train without CheckpointHook"
            )
        if self.start_from is not None:
            doing("loading the checkpoint")
            self._load(self.start_from, trainer)
            self.saved, trainer.states["checkpoint"] = trainer.state_dict(), self.start_from
        stop_signals.deferring = True

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.update_done:
            return
        stopping, is_due = self._agree(trainer.step)
        trainer.stopping |= stopping
        if is_due:
            self._save(trainer)

    def after_test_iter(self, trainer: Trainer, *_: Any) -> None:
        trainer.stopping |= self._agree()[0]

    def after_test(self, trainer: Trainer) -> None:
        figures = trainer.states["eval"]
        reached = figures.get("score", figures["top1"]), -figures["loss"]
        # rank 0 alone knows whether the best so far was written
        if math.isfinite(figures["loss"]) and ask_first_rank(lambda: reached > self.best):
            self._save(trainer, reached)

    def after_train(self, trainer: Trainer) -> None:
        self._finish_exchange()
        if trainer.step and self.saved != trainer.state_dict():
            self._save(trainer)
        doing("writing the last checkpoint")
        # no rank leaves before the write is done: the launcher would kill rank 0
        ask_first_rank(self.wait)
        stop_signals.deferring = trainer.stopping  # a stopped run ends normally

    def _agree(self, step: int | None = None) -> tuple[bool, bool]:
        """Return, equal on all ranks, whether to stop, and whether a checkpoint is due after
        ``step``.

        Of several ranks this is what they knew in the last call, so that none waits for the others;
        in an evaluation, without ``step``, what they know now, since it may be the last thing that
        the run does.
        """
        is_due = time.monotonic() - self.saved_at >= self.every_seconds
        flags = torch.tensor([stop_signals.received, is_due])
        if gpc.get_world_size(ParallelMode.GLOBAL) > 1:
            agreed = self._finish_exchange()
            if agreed[1]:  # it is saved now, or asked for again after the evaluation
                flags[1] = 0
            group = gpc.get_cpu_group(ParallelMode.GLOBAL)
            self.exchange = flags, dist.all_reduce(flags, dist.ReduceOp.MAX, group, async_op=True)
            flags = agreed if step is not None else agreed.maximum(self._finish_exchange())
        stop_signals.agreed = int(flags[0])
        return stop_signals.agreed != 0, bool(flags[1]) or (step or 1) % self.every_steps == 0

    def _finish_exchange(self) -> Tensor:
        """Return the flags that the ranks began to exchange last; zeros before the first
        exchange.
        """
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return torch.zeros(2, dtype=torch.int64)
        flags, work = exchange
        work.wait()
        return flags

    def _save(self, trainer: Trainer, best: tuple[float, float] | None = None) -> None:
        """Copy the state, which takes all ranks, and let rank 0 write it; waits for the write
        before this one.

        ``best``: (score, -loss) of the evaluation just done, if it is the best so far.
        """
        doing("saving a checkpoint")
        try:
            self.wait()
        except UserError as error:  # of the write before
            warn(f"{error}; training continues")
        content: dict[str, Tensors | bytes] = {
            **full_state_dict(self.model, self.optimizer, self.averages, self.buffers)
        }
        states = gather({"random": generator_states(), "metrics": self.metrics.state_dict()})
        self.saved, self.saved_at = trainer.state_dict(), time.monotonic()
        if gpc.get_global_rank() > 0:  # rank 0 writes
            return
        before, self.best = self.best, best or self.best
        state = {
            "trainer": self.saved,
            "loader": trainer.train_dataloader.state_dict(),
            "optimizer": trainer.engine.optimizer.step_state(),
            "metrics": [each["metrics"] for each in states],
            "best_top1": self.best[0],
            "best_loss": -self.best[1],
            "ranks": self.ranks,
        }
        content[RANDOM] = {
            f"{n}/{name}": t for n, each in enumerate(states) for name, t in each["random"].items()
        }
        content[TRAINER] = json.dumps(state, indent=2).encode()
        content[CONFIG] = json.dumps(self.about, indent=2, default=str).encode()
        metrics = self.folder.parent / METRICS
        content[METRICS] = metrics.read_bytes() if metrics.exists() else b""
        path = checkpoint_path(self.folder, self.saved["step"])
        self.writing = self.writer.submit(self._write_checkpoint, trainer, path, content, before)

    def _write_checkpoint(
        self,
        trainer: Trainer,
        path: Path,
        content: dict[str, Tensors | bytes],
        before: tuple[float, float],
    ) -> None:
        try:
            write_checkpoint(path, content)
            trainer.states["checkpoint"] = path
            if self.best > before:
                mark_best(path)
            clear_old(path, self.keep)
        except (OSError, SafetensorError) as error:  # safetensors raises the latter for the former
            self.best = before
            reason, newest = (
                getattr(error, "strerror", None) or error,
                newest_checkpoint(self.folder) or "none",
            )
            raise UserError(
                f"{path} could not be written ({reason}); the newest checkpoint is {newest}"
            ) from error

    def wait(self) -> None:
        """Wait for the last write; raise `UserError` if it failed."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()

    def _load(self, path: Path, trainer: Trainer) -> None:
        if not path.exists():
            raise RankError(
                f"{path} is not there on this node: --output must be on a file system that all "
                "nodes share"
            )
        state = read_trainer_state(path)
        load_full_state_dict(path, self.model, self.optimizer, self.averages)
        trainer.load_state_dict(state["trainer"])
        trainer.train_dataloader.load_state_dict(state["loader"])
        trainer.engine.optimizer.load_step_state(state["optimizer"])
        same_data = read_about(path)["data"]["fingerprint"] == self.about["data"]["fingerprint"]
        # a branch marks its own best; figures on different data do not compare
        if path.parent == self.folder and same_data:
            self.best = state["best_top1"], -state["best_loss"]
        is_same = state["ranks"] == self.ranks
        rank = gpc.get_global_rank()
        self.metrics.load_state_dict(state["metrics"], rank if is_same else None)
        # else the masks of dropout and drop_path, and what is drawn per micro-batch (Mixup), differ
        if is_same:
            prefix, states = f"{rank}/", load_file(path / RANDOM)
            set_generator_states(
                {k.removeprefix(prefix): v for k, v in states.items() if k.startswith(prefix)}
            )
