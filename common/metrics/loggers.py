"""The loggers of a run: each is called with the metrics of every record, and closed at the end."""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.errors import UserError
from common.files import own_file, read_text
from common.metrics.curves import Curves, read_raw_config
from common.metrics.metrics_file import UNPLOTTED, Metrics, finite
from common.process import set_variable
from common.text import did_you_mean, printable

PROGRESS_BAR = "progress bar"  # its key in what `open_loggers` returns


def open_loggers(
    folder: Path,
    start: int,
    total_steps: int,
    *,
    tensorboard: bool,
    trackers: Iterable[str],
    best: str = "top1",
    images: tuple[int, ...] | None = None,
) -> dict[str, "Guarded"]:
    """Return the loggers of a run by name.

    ``folder`` contains config.json; ``start``: optimizer steps completed before; ``best``: the
    config's BEST; ``images``: done before and of the whole run, where steps have several batches.
    """
    builders: dict[str, Callable[..., Any]] = {"metrics.jsonl": JsonLines, "curves": Curves}
    if tensorboard:
        builders["tensorboard"] = TensorBoard
    for name in trackers:
        builders[name] = LOGGERS[name]
    # built last: it starts its clock
    builders[PROGRESS_BAR] = partial(ProgressBar, best=best, images=images)
    return {
        name: Guarded(name, partial(build, folder, start, total_steps))
        for name, build in builders.items()
    }


def check_trackers(names: Sequence[str]) -> None:
    """Raise `UserError` for the first of ``LOG.trackers`` that is unknown or not installed."""
    for name in names:
        if name not in LOGGERS:
            raise UserError(
                f"LOG.trackers={list(names)}: expected "
                f"{', '.join(LOGGERS)}{did_you_mean(name, LOGGERS)}"
            )
        if find_spec(name) is None:
            raise UserError(
                f"LOG.trackers={list(names)}: {name} is not installed; pip install {name}"
            )


class Guarded:
    """A logger whose first error becomes a warning; training continues without it."""

    def __init__(self, name: str, build: Callable[[], Any]):
        self.name = name
        self.logger = self._attempt(build)

    def __call__(self, metrics: Metrics) -> None:
        if self.logger:
            self._attempt(self.logger, metrics)

    def step(self, count: int = 1) -> None:
        if self.logger:
            self._attempt(self.logger.step, count)

    def close(self, failed: bool = False) -> None:
        """Close the logger, once; one that has an ``abort`` learns that the training ``failed``."""
        if self.logger:
            close = self.logger.close
            if failed:
                close = getattr(self.logger, "abort", close)
            self._attempt(close)
            self.logger = None

    def _attempt(self, action: Callable[..., Any], *args: Any) -> Any:
        try:
            return action(*args)
        # Whatever its type: a tracker must not end the run.
        except Exception as error:
            self.logger = None  # a tracker that is down must not delay every record
            warn(f"{self.name}: {type(error).__name__}: {error}; training continues without it")
            return None


def warn(text: str) -> None:
    """Print one line on stderr, above a progress bar; do nothing if stderr is closed."""
    with suppress(OSError):
        tqdm.write(f"warning: {printable(' '.join(text.split()))}", file=sys.stderr)


class JsonLines:
    """Append each record as a line of JSON to metrics.jsonl; null stands for what is not finite.

    Lines that cannot be written, for example on a full disk, are kept and retried.
    """

    def __init__(self, folder: Path, *_: int):
        self.path = folder / "metrics.jsonl"
        # unbuffered, so that a write tells how much of a line the disk has taken
        self.file = self.path.open("ab", buffering=0)
        self.pending = b""
        self.warned = False

    def __call__(self, metrics: Metrics) -> None:
        self.pending += json.dumps(finite(metrics)).encode() + b"\n"
        try:
            while self.pending:
                self.pending = self.pending[self.file.write(self.pending) :]
        except OSError as error:
            if not self.warned:
                remedy = "its lines are kept in memory until they can be written"
                warn(f"{self.path}: {error.strerror}; {remedy}")
            self.warned = True

    def close(self) -> None:
        self.file.write(self.pending)
        self.file.close()


class TensorBoard:
    """Write each metric as a scalar ``<kind>/<name>``."""

    def __init__(self, folder: Path, start: int, _: int):
        """Hide an interrupted run's events after step ``start``."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)

    def __call__(self, metrics: Metrics) -> None:
        for name, value in _select(metrics).items():
            self.writer.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Log to Weights & Biases, offline in the run's folder unless WANDB_MODE is set.

    A resumed run keeps its id. Offline, each start creates another ``offline-run-*``; ``wandb
    sync`` uploads and merges them. WANDB_PROJECT overrides the project, vit-large-batch.
    """

    def __init__(self, folder: Path, *_: int):
        # wandb would report errors to its authors. A run sends only what its user asks for.
        if "WANDB_ERROR_REPORTING" not in os.environ:
            set_variable("WANDB_ERROR_REPORTING", "false")
        import wandb

        id_file = own_file(folder / "wandb_id")
        mode = os.environ.get("WANDB_MODE", "offline")
        # Offline, wandb ignores `resume` with a warning. By the id, `wandb sync` merges the parts.
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "vit-large-batch"),
            name=folder.name,
            id=read_text(id_file) if id_file.exists() else None,
            resume="allow" if mode == "online" else None,
            dir=str(folder),
            config=read_raw_config(folder),
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
        id_file.write_text(self.run.id)

    def __call__(self, metrics: Metrics) -> None:
        self.run.log(_select(metrics), step=metrics["step"])

    def close(self) -> None:
        self.run.finish()

    def abort(self) -> None:
        self.run.finish(exit_code=1)


# What a config chooses, by the package that it needs: LOG.tensorboard the first, LOG.trackers any.
LOGGERS: dict[str, Callable[[Path, int, int], Any]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def _select(metrics: Metrics) -> dict[str, float]:
    """Return the metrics that are known as ``{"<kind>/<name>": value}``."""
    return {
        f"{metrics['kind']}/{name}": value
        for name, value in metrics.items()
        if name not in UNPLOTTED and value is not None
    }


class ProgressBar:
    """Show steps done, time left, images per second, the last loss and top-1, and skipped updates.

    On a terminal, one line that fits in 80 columns; elsewhere, a line at the start, every 30 s and
    at the end. Each evaluation prints a line of its own, with the metric ``best``.
    """

    def __init__(
        self,
        folder: Path,
        start: int,
        total_steps: int,
        best: str = "top1",
        images: tuple[int, ...] | None = None,
    ):
        self.best = best
        done, total = images or (start, total_steps)
        unit = " images" if images else "step"
        # tqdm's own lock is shared with forked processes, and a killed one may never release it
        tqdm.set_lock(threading.RLock())
        options: dict[str, Any] = dict(mininterval=30, file=_Lines())
        if sys.stderr.isatty():
            # no bar and no steps/s, to leave room for the metrics
            short = "{percentage:.0f}% {n_fmt}/{total_fmt} {remaining} left{postfix}"
            options = dict(mininterval=0.5, dynamic_ncols=True, bar_format=short)
        self.bar = tqdm(total=total, initial=done, unit=unit, maxinterval=60, **options)
        self.shown: dict[str, str] = {}

    def step(self, count: int = 1) -> None:
        """Count a step, or the images of one."""
        self.bar.update(count)

    def __call__(self, metrics: Metrics) -> None:
        if metrics["kind"] == "train":
            self._show("loss", f"{metrics['loss']:.4f}")
            self._show("img/s", f"{metrics['samples_per_s']:,.0f}")
            if metrics["skipped"]:
                self._show("skipped", f"{metrics['skipped']}")
        elif metrics["kind"] == "eval":
            self._show("top1", f"{metrics['top1']:.3f}")
            names = dict.fromkeys(["top1", "top5", "loss", self.best])
            figures = ", ".join(f"{name} {metrics[name]:.4f}" for name in names if name in metrics)
            with suppress(OSError):  # standard output is closed
                self.bar.write(
                    f"epoch {metrics['epoch']:g}: {figures} on {metrics['samples']:,} images"
                )

    def _show(self, name: str, value: str) -> None:
        """Show ``value`` after the bar from now on."""
        self.shown[name] = value
        self.bar.set_postfix(self.shown, refresh=False)

    def close(self) -> None:
        self.bar.close()


class _Lines:
    """Write each state of a progress bar as one line on stderr, if it is not a terminal."""

    def write(self, text: str) -> None:
        line = text.strip()
        if line:
            # One write, which `print` does not promise: ranks share stderr.
            sys.stderr.write(f"{line}\n")
