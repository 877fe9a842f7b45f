"""A run's metrics.jsonl, read back and drawn."""

import json
import math
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from common.errors import UserError
from common.files import Count, own_file, parse_json, read_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def build_figure(width: float = 6.4, height: float = 4.0) -> tuple["Figure", Any]:
    """Return a figure of ``width`` x ``height`` inches, and its axes."""
    from matplotlib.figure import Figure  # takes half a second to import

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes


def place_legend(axes: "Axes", columns: int = 4) -> None:
    """Put the legend above the axes, where it hides no data."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, borderaxespad=0.2
    )


def save_figure(figure: "Figure", path: Path) -> None:
    """Write the figure to ``path``, as PNG or JPEG."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font"
        )  # of a class's name, drawn as a box
        figure.savefig(own_file(path), dpi=150, pil_kwargs={"quality": 90})


DRAWING_EVERY = 100.0  # seconds, at least; a drawing takes 0.3
MAX_METRICS, MAX_LINE = (
    1 << 29,
    1 << 16,
)  # bytes of metrics.jsonl, some 1,500,000 lines, and of a line
WHEN = ("kind", "step", "epoch", "time")
EVALUATED = {"loss", "top1", "top5", "samples"}

Metrics = Mapping[str, Any]
Share = Annotated[float, Field(ge=0, le=1)]
Loss = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(lambda value: math.nan if value is None else value),
]


class MetricsLine(BaseModel):
    """A line of metrics.jsonl. Metrics are numbers, or null if not finite; a null loss is read as
    NaN.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, float | None]
    kind: str
    step: Count
    epoch: float = Field(0.0, ge=0, le=1e12)
    time: float = Field(0.0, ge=0, le=1e11)
    skipped: Count = 0
    samples: Count = 0
    loss: Loss = math.nan
    top1: Share = 0.0
    top5: Share = 0.0

    @model_validator(mode="after")
    def _is_measured(self) -> "MetricsLine":
        if self.kind == "eval" and (missing := EVALUATED - self.model_fields_set):
            raise ValueError(f"an evaluation without {', '.join(sorted(missing))}")
        return self


def read_metrics(folder: Path) -> list[Metrics]:
    """Return the lines of a run's metrics.jsonl; ignore an incomplete last line, as left by a
    crash.
    """
    path = folder / "metrics.jsonl"
    *lines, last = read_bytes(path, MAX_METRICS).split(b"\n")
    metrics = [_parse(line, f"{path} line {number}") for number, line in enumerate(lines, 1)]
    with suppress(UserError):
        metrics.append(_parse(last, ""))
    return metrics


def _parse(line: bytes, where: str) -> Metrics:
    return parse_json(line[:MAX_LINE], MetricsLine, where).model_dump(exclude_unset=True)


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
