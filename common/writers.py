"""Where the figures of a run go: a writer is called with each record (a dict), and closed at the end."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

Record = Mapping[str, Any]


class JsonLines:
    """Append each record as one line of JSON; figures that are not finite become null."""

    def __init__(self, path: Path):
        self.file = path.open("a")

    def __call__(self, record: Record) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.file.write(json.dumps(finite) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Write each figure as a scalar ``<kind>/<name>`` over optimiser steps."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self.writer = SummaryWriter(str(folder))

    def __call__(self, record: Record) -> None:
        for name, value in record.items():
            if name not in ("kind", "step", "time"):
                self.writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        self.writer.close()


class ProgressBar:
    """Show steps done, time left, images per second, the last loss, skipped updates; rarely, if not on a terminal."""

    def __init__(self, total_steps: int):
        interval = 0.5 if sys.stderr.isatty() else 30
        self.bar = tqdm(total=total_steps, unit="step", mininterval=interval, maxinterval=60, dynamic_ncols=True)
        self.shown: dict[str, str] = {}

    def step(self) -> None:
        self.bar.update()

    def __call__(self, record: Record) -> None:
        if record["kind"] == "train":
            self.shown |= {"loss": f"{record['loss']:.4f}", "img/s": f"{record['samples_per_s']:,.0f}"}
            if record["skipped"]:
                self.shown["skipped"] = f"{record['skipped']}"
            self.bar.set_postfix(self.shown, refresh=False)
        else:
            self.shown["top1"] = f"{record['top1']:.4f}"
            self.bar.write(
                f"epoch {record['epoch']:g}: top1 {record['top1']:.4f}, top5 {record['top5']:.4f}, "
                f"loss {record['loss']:.4f} on {record['samples']:,} images"
            )

    def close(self) -> None:
        self.bar.close()


class Curves:
    """Redraw loss.jpeg and acc.jpeg from metrics.jsonl at each evaluation."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, record: Record) -> None:
        if record["kind"] == "eval":
            draw_curves(self.folder)

    def close(self) -> None:
        pass


def read_metrics(folder: Path) -> list[Record]:
    """Return the records of a run's metrics.jsonl; a last line that a crash cut short is left out."""
    records = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def draw_curves(folder: Path) -> None:
    """Draw a run's training and evaluation loss (loss.jpeg), and its top-1 and top-5 accuracy (acc.jpeg)."""
    from matplotlib.figure import Figure

    records = read_metrics(folder)

    def curve(kind: str, name: str) -> tuple[list[int], list[float]]:
        points = [(r["step"], r[name]) for r in records if r["kind"] == kind and r[name] is not None]
        return [step for step, _ in points], [value for _, value in points]

    pictures = {
        "loss.jpeg": ("loss", [("train", "loss", 1.0, "training"), ("eval", "loss", 1.0, "evaluation")]),
        "acc.jpeg": ("accuracy (%)", [("eval", "top1", 100.0, "top-1"), ("eval", "top5", 100.0, "top-5")]),
    }
    for name, (label, lines) in pictures.items():
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        axes = figure.subplots()
        for kind, key, scale, title in lines:
            steps, values = curve(kind, key)
            marker = "o" if kind == "eval" else None
            axes.plot(steps, [scale * value for value in values], label=title, marker=marker, markersize=3)
        axes.set(xlabel="optimiser step", ylabel=label, title=folder.name)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(folder / name, dpi=120)
