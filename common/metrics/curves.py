"""The curves of a run, loss.jpeg and acc.jpeg."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.files import Values
from common.metrics.metrics_file import Metrics, read_metrics
from common.metrics.plot import build_figure, place_legend, save_figure, wrap_text

DRAWING_EVERY = 100.0  # seconds, at least; a drawing takes 0.3


class Curves:
    """Redraw the pictures at the end, and every `DRAWING_EVERY` seconds after an evaluation."""

    def __init__(self, folder: Path, *_: int):
        self.folder = folder
        self.is_stale = False
        self.drawn = time.perf_counter()

    def __call__(self, metrics: Metrics) -> None:
        self.is_stale = True
        # Train records change no curve of acc.jpeg, and come too often.
        if metrics["kind"] == "eval" and time.perf_counter() - self.drawn >= DRAWING_EVERY:
            self.close()

    def close(self) -> None:
        if self.is_stale:
            draw_curves(self.folder)
            self.drawn = time.perf_counter()  # after it, as drawing takes time
            self.is_stale = False


def read_raw_config(folder: Path) -> dict[str, Any]:
    """Return a run's config, unchecked; {} for a folder of metrics alone, which has none."""
    file = folder / "config.json"
    return json.loads(file.read_text())["config"] if file.exists() else {}


def name_loss(config: Values) -> str:
    """Return what the training loss is; that of an evaluation is always the cross-entropy."""
    parts = ["cross-entropy" if config.get("BCE_THRESHOLD") is None else "binary cross-entropy"]
    for key in ("LABEL_SMOOTHING", "MIXUP", "CUTMIX"):
        if config.get(key):
            parts.append(f"{key.lower().replace('_', ' ')} {config[key]}")
    weights = config.get("CLASS_WEIGHTS")
    if weights:
        parts.append(f"class weights {weights if isinstance(weights, str) else 'listed'}")
    return ", ".join(parts)


def draw_curves(folder: Path) -> None:
    """Plot a run's losses to loss.jpeg, and its top-1 and top-5 accuracy to acc.jpeg."""
    records = read_metrics(folder)
    # The names of a sweep's runs have no spaces, at which lines break.
    title = folder.resolve().name.replace(",", ", ")

    def draw(picture: str, ylabel: str, scale: float, curves: Sequence[tuple[str, ...]]) -> None:
        figure, axes = build_figure()
        for kind, metric, label, style in curves:
            drawn = [record for record in records if record["kind"] == kind and metric in record]
            # A loss that is not finite is NaN here, which leaves a gap in the line.
            axes.plot(
                [record["step"] for record in drawn],
                [scale * record[metric] for record in drawn],
                style,
                color="tab:blue",
                alpha=0.45 if kind == "train" else 1.0,
                label=label,
                markersize=4,
            )
        axes.set(xlabel="optimizer step", ylabel=ylabel)
        axes.set_title(wrap_text(figure, title), fontsize="medium")
        place_legend(axes)
        save_figure(figure, folder / picture)

    losses = [
        ("train", "loss", f"training: {name_loss(read_raw_config(folder))}", "-"),
        ("eval", "loss", "evaluation: cross-entropy", "o-"),
    ]
    accuracies = [("eval", "top1", "top-1", "o-"), ("eval", "top5", "top-5", "s--")]
    draw("loss.jpeg", "loss", 1, losses)
    draw("acc.jpeg", "accuracy (%)", 100, accuracies)
