"""The curves of a run, loss.jpeg and acc.jpeg."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.metrics.metrics_file import Metrics, read_metrics
from common.plot import build_figure, place_legend, save_figure

DRAWING_EVERY = 100.0  # seconds, at least; a drawing takes 0.3


class Curves:
    """Redraw loss.jpeg and acc.jpeg after evaluations, at most every `DRAWING_EVERY` seconds, and
    at the end.
    """

    def __init__(self, folder: Path, *_: int):
        self.folder, self.stale, self.drawn = folder, False, time.perf_counter()

    def __call__(self, metrics: Metrics) -> None:
        self.stale = True
        if metrics["kind"] == "eval" and time.perf_counter() - self.drawn >= DRAWING_EVERY:
            self.close()

    def close(self) -> None:
        if self.stale:
            draw_curves(self.folder)
            self.drawn, self.stale = time.perf_counter(), False


def name_loss(config: Mapping[str, Any]) -> str:
    """Return what the training loss is; that of an evaluation is always the cross-entropy."""
    name = "cross-entropy" if config.get("BCE_THRESHOLD") is None else "binary cross-entropy"
    parts = [
        f"{key} {config[key]}" for key in ("LABEL_SMOOTHING", "MIXUP", "CUTMIX") if config.get(key)
    ]
    return ", ".join([name, *(part.lower().replace("_", " ") for part in parts)])


def draw_curves(folder: Path) -> None:
    """Plot a run's training and evaluation loss, and its top-1 and top-5 accuracy: loss.jpeg and
    acc.jpeg.
    """
    lines = read_metrics(folder)
    about = folder / "config.json"
    config = json.loads(about.read_text())["config"] if about.exists() else {}
    losses = [
        ("train", "loss", f"training: {name_loss(config)}", "-"),
        ("eval", "loss", "evaluation: cross-entropy", "o-"),
    ]
    accuracies = [("eval", "top1", "top-1", "o-"), ("eval", "top5", "top-5", "s--")]
    pictures = [("loss", "loss", 1.0, losses), ("acc", "accuracy (%)", 100.0, accuracies)]
    for name, label, scale, curves in pictures:
        figure, axes = build_figure()
        for kind, key, title, style in curves:
            drawn = [line for line in lines if line["kind"] == kind and key in line]
            steps, values = [line["step"] for line in drawn], [scale * line[key] for line in drawn]
            shade = 0.45 if kind == "train" else 1.0
            axes.plot(
                steps, values, style, color="tab:blue", alpha=shade, label=title, markersize=4
            )
        axes.set(xlabel="optimizer step", ylabel=label)
        axes.set_title(folder.resolve().name, loc="right", fontsize="medium")
        place_legend(axes)
        save_figure(figure, folder / f"{name}.jpeg")
