"""Writers of a run's metrics: a writer is called with each record (a dict), and closed at the end."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.errors import UserError, printable
from common.files import parse_json, read_bytes
from common.metrics.record import Record, RecordSchema, select_metrics
from common.metrics.trackers import TRACKERS
from common.plot import build_figure, place_legend, save_figure

DRAWING_EVERY = 100.0  # seconds, at least; a drawing takes 0.3
MAX_METRICS, MAX_LINE = 1 << 29, 1 << 16  # bytes of metrics.jsonl, some 1,500,000 records, and of a record


def open_writers(
    folder: Path, total_steps: int, start: int = 0, *, tensorboard: bool, trackers: Iterable[str]
) -> list["Guarded"]:
    """Return the writers of a run; the last is the progress bar.

    ``folder`` contains config.json; ``start``: optimizer steps completed before.
    """
    builders: dict[str, Callable[[], Any]] = {"metrics.jsonl": lambda: JsonLines(folder / "metrics.jsonl")}
    builders["curves"] = lambda: Curves(folder)
    if tensorboard:
        builders["TensorBoard"] = lambda: TensorBoard(folder / "tensorboard", start)
    builders |= {name: partial(TRACKERS[name], folder) for name in trackers}
    builders["progress bar"] = lambda: ProgressBar(total_steps, start)  # last: it starts its clock
    return [Guarded(name, build) for name, build in builders.items()]


class Guarded:
    """Wrap a writer that may fail: its first error becomes a warning, and training continues without it."""

    def __init__(self, name: str, build: Callable[[], Any]):
        self.name, self.writer = name, None
        self.writer = self._attempt(build)

    def __call__(self, record: Record) -> None:
        if self.writer:
            self._attempt(self.writer, record)

    def step(self, loss: float | None = None) -> None:
        if self.writer:
            self._attempt(self.writer.step, loss)

    def close(self) -> None:
        if self.writer:
            self._attempt(self.writer.close)

    def _attempt(self, action: Callable[..., Any], *args: Any) -> Any:
        try:
            return action(*args)
        except Exception as error:  # a tracker's error must not end the run
            self.writer = None
            warn(f"{self.name}: {type(error).__name__}: {error}; training continues without it")
            return None


def warn(text: str) -> None:
    """Print one line on stderr, above a progress bar; do nothing if stderr is closed."""
    with suppress(OSError):
        tqdm.write(f"warning: {printable(' '.join(text.split()))}", file=sys.stderr)


class JsonLines:
    """Append each record as one line of JSON; metrics that are not finite become null.

    Lines that cannot be written, for example on a full disk, are kept and retried.
    """

    def __init__(self, path: Path):
        self.path = path
        self.file = path.open("ab", buffering=0)  # so that we know how much of a line was written
        self.pending = b""
        self.warned = False

    def __call__(self, record: Record) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.pending += json.dumps(finite).encode() + b"\n"
        try:
            self._write_pending()
        except OSError as error:
            if not self.warned:
                warn(f"{self.path}: {error.strerror}; its lines are kept in memory until they can be written")
            self.warned = True

    def _write_pending(self) -> None:
        while self.pending:
            self.pending = self.pending[self.file.write(self.pending) :]

    def close(self) -> None:
        try:
            self._write_pending()
        except OSError as error:
            lost = self.pending.count(b"\n")
            warn(f"{self.path}: {error.strerror}; its last {lost} lines are lost")
        self.file.close()


class TensorBoard:
    """Write each metric as a scalar ``<kind>/<name>`` over optimizer steps."""

    def __init__(self, folder: Path, start: int = 0):
        """Hide an interrupted run's events after step ``start``."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self.writer = SummaryWriter(str(folder), purge_step=start + 1)

    def __call__(self, record: Record) -> None:
        for name, value in select_metrics(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()


class ProgressBar:
    """Show steps done, time left, images per second, the last loss and top-1, and skipped updates.

    On a terminal, one line that fits in 80 columns; elsewhere, a line at the start, every 30 s and at the end.
    """

    def __init__(self, total_steps: int, start: int = 0):
        # tqdm's default lock is shared with forked processes; a killed one may never release it
        tqdm.set_lock(threading.RLock())
        options: dict[str, Any] = dict(mininterval=30, file=_Lines())
        if sys.stderr.isatty():
            short = "{percentage:.0f}% {n_fmt}/{total_fmt} {remaining} left{postfix}"  # no bar, no steps/s
            options = dict(mininterval=0.5, dynamic_ncols=True, bar_format=short)
        self.bar = tqdm(total=total_steps, initial=start, unit="step", maxinterval=60, **options)
        self.shown: dict[str, str] = {}

    def step(self, loss: float | None = None) -> None:
        """Count a step; show ``loss`` if the step has no record."""
        if loss is not None:
            self._show(loss=f"{loss:.4f}")
        self.bar.update()

    def __call__(self, record: Record) -> None:
        if record["kind"] == "train":
            self._show(**{"loss": f"{record['loss']:.4f}", "img/s": f"{record['samples_per_s']:,.0f}"})
            if record["skipped"]:
                self._show(skipped=f"{record['skipped']}")
        else:
            self._show(top1=f"{record['top1']:.3f}")
            with suppress(OSError):  # standard output is closed
                self.bar.write(
                    f"epoch {record['epoch']:g}: top1 {record['top1']:.4f}, top5 {record['top5']:.4f}, "
                    f"loss {record['loss']:.4f} on {record['samples']:,} images"
                )

    def _show(self, **values: str) -> None:
        self.shown |= values
        self.bar.set_postfix(self.shown, refresh=False)

    def close(self) -> None:
        self.bar.close()


class _Lines:
    """Write each state of a progress bar as one line on stderr, if it is not a terminal."""

    def write(self, text: str) -> None:
        if line := text.strip():
            sys.stderr.write(f"{line}\n")  # one write, unlike print, since ranks share stderr

    def flush(self) -> None:
        sys.stderr.flush()


class Curves:
    """Redraw loss.jpeg and acc.jpeg after evaluations, at most every `DRAWING_EVERY` seconds, and at the end."""

    def __init__(self, folder: Path):
        self.folder, self.stale, self.drawn = folder, False, time.perf_counter()

    def __call__(self, record: Record) -> None:
        self.stale = True
        if record["kind"] == "eval" and time.perf_counter() - self.drawn >= DRAWING_EVERY:
            self.close()

    def close(self) -> None:
        if self.stale:
            draw_curves(self.folder)
            self.drawn, self.stale = time.perf_counter(), False


def read_metrics(folder: Path) -> list[Record]:
    """Return the records of a run's metrics.jsonl; ignore an incomplete last line, as left by a crash."""
    path = folder / "metrics.jsonl"
    *lines, last = read_bytes(path, MAX_METRICS).split(b"\n")
    records = [_parse_record(line, f"{path} line {number}") for number, line in enumerate(lines, 1)]
    with suppress(UserError):
        records.append(_parse_record(last, ""))
    return records


def _parse_record(line: bytes, where: str) -> Record:
    return parse_json(line[:MAX_LINE], RecordSchema, where).model_dump(exclude_unset=True)


def draw_curves(folder: Path) -> None:
    """Plot a run's training and evaluation loss, and its top-1 and top-5 accuracy: ``{loss,acc}.{png,jpeg}``."""
    records = read_metrics(folder)
    losses = [("train", "loss", "training", "-"), ("eval", "loss", "evaluation", "o-")]
    accuracies = [("eval", "top1", "top-1", "o-"), ("eval", "top5", "top-5", "s--")]
    pictures = [("loss", "loss (cross-entropy)", 1.0, losses), ("acc", "accuracy (%)", 100.0, accuracies)]
    for name, label, scale, lines in pictures:
        figure, axes = build_figure()
        for kind, key, title, style in lines:
            points = [(r["step"], scale * r[key]) for r in records if r["kind"] == kind and r.get(key) is not None]
            shade = 0.45 if kind == "train" else 1.0
            steps, values = zip(*points, strict=True) if points else ((), ())
            axes.plot(steps, values, style, color="tab:blue", alpha=shade, label=title, markersize=4)
        axes.set(xlabel="optimizer step", ylabel=label)
        axes.set_title(folder.resolve().name, loc="right", fontsize="medium")
        place_legend(axes)
        save_figure(figure, folder / f"{name}.png", jpeg=True)
