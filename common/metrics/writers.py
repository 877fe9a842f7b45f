"""Where the metrics of a run go: a writer is called with each record (a dict), and closed at the end."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.errors import UserError
from common.metrics.record import Record, select_metrics
from common.metrics.trackers import TRACKERS
from common.plot import build_figure, place_legend, save_figure

DRAWING_SHARE = 0.003  # of a run's time, at most, goes into redrawing its curves
FIRST_DRAWING = 0.5  # seconds: most of it imports matplotlib


def open_writers(
    folder: Path, total_steps: int, start: int = 0, *, tensorboard: bool, trackers: Iterable[str]
) -> list["Guarded"]:
    """Return the writers of a run, whose ``folder`` holds config.json; the last is the progress bar.

    ``start``: optimizer steps that were done before.
    """
    writers = [
        Guarded("metrics.jsonl", lambda: JsonLines(folder / "metrics.jsonl")),
        Guarded("curves", lambda: Curves(folder)),
    ]
    if tensorboard:
        writers.append(Guarded("TensorBoard", lambda: TensorBoard(folder / "tensorboard", start)))
    for name in trackers:
        writers.append(Guarded(name, lambda name=name: TRACKERS[name](folder)))
    # last, because it starts its clock, and a tracker takes seconds to open
    return [*writers, Guarded("progress bar", lambda: ProgressBar(total_steps, start))]


class Guarded:
    """A writer that may fail: what it raises is told once on stderr, and training continues without it."""

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
        except Exception as error:  # whatever a tracker raises, it is not worth a run
            self.writer = None
            warn(f"{self.name}: {type(error).__name__}: {error}; training continues without it")
            return None


def warn(text: str) -> None:
    """Print one line on stderr, above a progress bar; where stderr is gone, print nothing."""
    with suppress(OSError):
        tqdm.write(f"warning: {' '.join(text.split())}", file=sys.stderr)


class JsonLines:
    """Append each record as one line of JSON; metrics that are not finite become null.

    Lines that cannot be written, on a full disk say, are kept and written as soon as they can be.
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
        """``start``: optimizer steps that were done before; metrics of later ones, from a run that died, are hidden."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self.writer = SummaryWriter(str(folder), purge_step=start + 1)

    def __call__(self, record: Record) -> None:
        for name, value in select_metrics(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()


class ProgressBar:
    """Show steps done, time left, images per second, the last loss and top-1, and skipped updates.

    On a terminal that is a bar. Elsewhere it is a line at the start, every half minute and at the end.
    """

    def __init__(self, total_steps: int, start: int = 0):
        # tqdm's own lock is a semaphore of all processes that are forked from one: killed, they may never give it back.
        tqdm.set_lock(threading.RLock())
        options = (
            dict(mininterval=0.5, dynamic_ncols=True) if sys.stderr.isatty() else dict(mininterval=30, file=_Lines())
        )
        self.bar = tqdm(total=total_steps, initial=start, unit="step", maxinterval=60, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]
        self.shown: dict[str, str] = {}

    def step(self, loss: float | None = None) -> None:
        """Count a step, and show the ``loss`` of one that has no record."""
        if loss is not None:
            self._show(loss=f"{loss:.4f}")
        self.bar.update()

    def __call__(self, record: Record) -> None:
        if record["kind"] == "train":
            self._show(**{"loss": f"{record['loss']:.4f}", "img/s": f"{record['samples_per_s']:,.0f}"})
            if record["skipped"]:
                self._show(skipped=f"{record['skipped']}")
        else:
            self._show(top1=f"{record['top1']:.4f}")
            with suppress(OSError):  # nobody reads standard output any more
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
    """Where a progress bar writes that is no terminal: each state of the bar is a line of its own on stderr."""

    def write(self, text: str) -> None:
        if line := text.strip():
            sys.stderr.write(f"{line}\n")  # whole, unlike print: other ranks may speak too

    def flush(self) -> None:
        sys.stderr.flush()


class Curves:
    """Redraw loss.jpeg and acc.jpeg at the end, and before it at evaluations, as often as `DRAWING_SHARE` allows."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.started = time.perf_counter()
        self.spent, self.last = 0.0, FIRST_DRAWING
        self.stale = False

    def __call__(self, record: Record) -> None:
        self.stale = True
        share = (self.spent + self.last) / (time.perf_counter() - self.started)
        if record["kind"] == "eval" and share <= DRAWING_SHARE:
            self._draw()

    def _draw(self) -> None:
        started = time.perf_counter()
        draw_curves(self.folder)
        self.last = time.perf_counter() - started
        self.spent += self.last
        self.stale = False

    def close(self) -> None:
        if self.stale:
            self._draw()


def read_metrics(folder: Path) -> list[Record]:
    """Return the records of a run's metrics.jsonl; a last line that a crash cut short is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise UserError(f"{path} line {number}: no JSON; remove that line") from error
    return records


def draw_curves(folder: Path) -> None:
    """Draw a run's training and evaluation loss, and its top-1 and top-5 accuracy: ``{loss,acc}.{png,jpeg}``."""
    records = read_metrics(folder)
    pictures = {
        "loss": (
            "loss (cross-entropy)",
            1.0,
            [("train", "loss", "training", "-"), ("eval", "loss", "evaluation", "o-")],
        ),
        "acc": ("accuracy (%)", 100.0, [("eval", "top1", "top-1", "o-"), ("eval", "top5", "top-5", "s--")]),
    }
    for name, (label, scale, lines) in pictures.items():
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
