"""The records of metrics.jsonl: their fields, how a report titles them, and the reader.

A run appends a JSON object a line: a ``train`` record every ``LOG.every`` optimizer steps, an
``eval`` record at each evaluation, and a `NON_FINITE` record of each step that is not finite.
"""

import math
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from common.errors import UserError
from common.files import Count, Values, parse_json, read_bytes

MAX_METRICS = 1 << 29  # bytes of the file, about 1,500,000 lines
MAX_LINE = 1 << 16  # bytes
UNPLOTTED = ("kind", "step", "epoch", "time", "samples", "images")  # fields that are no metrics
NON_FINITE = "non_finite"  # a kind of record: the step, and if known its micro-batch and rank
EVALUATED = {"loss", "top1", "top5", "samples"}  # what no eval record lacks

Metrics = Values
Metric = float | None  # None, null in the file: not finite
Share = Annotated[float, Field(ge=0, le=1)]
Loss = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(lambda value: math.nan if value is None else value),
]
# Of a field that this version does not know, what is no number counts as no value.
OtherMetric = Annotated[
    Metric, BeforeValidator(lambda value: value if type(value) in (int, float) else None)
]


class Record(BaseModel):
    """A line of metrics.jsonl. Only ``kind`` and ``step`` are required of a train record.

    Other fields may follow, from a hook of the user's or from another version.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, OtherMetric]

    kind: str  # "train", "eval" or `NON_FINITE`
    step: Count  # optimizer steps completed
    epoch: float = Field(0.0, ge=0, le=1e12)  # epochs completed, fractional
    time: float = Field(0.0, ge=0, le=1e11)  # Unix time, seconds
    loss: Loss = math.nan  # mean since the last train record; in evaluation, of all samples

    images: list[str] = []  # of a `NON_FINITE` record: the first of those that may be the cause

    # Metrics of one kind of record, described in `CHARTS`; those of a train record may be missing.
    skipped: Count = 0
    samples: Count = 0  # evaluated, each once
    top1: Share = 0.0
    top5: Share = 0.0

    @model_validator(mode="after")
    def _is_measured(self) -> "Record":
        missing = EVALUATED - self.model_fields_set
        if self.kind == "eval" and missing:
            raise ValueError(f"an evaluation without {', '.join(sorted(missing))}")
        return self


class Chart(NamedTuple):
    """How report.html shows a metric."""

    title: str
    scale: float = 1  # factor from metrics.jsonl to the page


# Every metric that a run writes: its unit and meaning in the file, and its title. This is the order
# of the page, in which a user's own follow under their names. null: not finite.
CHARTS = {
    # In both kinds of record: cross-entropy in nats, of training the loss that is minimised.
    "loss": Chart("Loss"),
    # Of an evaluation, from 0 to 1: shares of the samples, then means over the classes.
    "top1": Chart("Top-1 accuracy, %", 100),
    "top5": Chart("Top-5 accuracy, %", 100),
    "mean_recall": Chart("Mean recall of the classes, %", 100),
    "macro_f1": Chart("Macro F1, %", 100),
    # Of two classes only.
    "auroc": Chart("Area under the ROC curve, %", 100),
    # Of the last step: that of the highest group, and the L2 norm over all parameters.
    "lr": Chart("Learning rate"),
    "grad_norm": Chart("Gradient norm before clipping"),
    # Pixels of a side in the last step, where IMAGE_SIZES changes it.
    "image_size": Chart("Side of the training images, pixels"),
    # Images of the last step, over all GPUs, where BATCH_SIZES changes it.
    "batch_size": Chart("Images of a step"),
    # Images, averaged over about 100 steps. null: above any number. Missing where all steps are
    # single micro-batches.
    "noise_scale": Chart("Gradient noise scale, images (dashed: the batch)"),
    # As noise_scale, in the norm of the optimizer; of LAMB and Muon only.
    "optimizer_noise_scale": Chart(
        "Noise scale in the norm of the optimizer, images (dashed: the batch)"
    ),
    # Updates since step 0 that were skipped because of non-finite values.
    "skipped": Chart("Updates skipped so far"),
    # Images a second, over all GPUs.
    "samples_per_s": Chart("Images per second, all GPUs"),
    # Model FLOP/s as a fraction of the GPUs' peak, or of the one measured.
    "mfu": Chart("Model FLOPs utilisation, %", 100),
    # Fraction of the time that rank 0, with a GPU its GPU, waited for its loader.
    "data_wait": Chart("Time waiting for data, %", 100),
    # Seconds of a step in the forward passes with the loss, and in the backward passes.
    "forward_s": Chart("Forward passes of a step, ms", 1e3),
    "backward_s": Chart("Backward passes of a step, ms", 1e3),
    # 1e9 bytes, of rank 0; without DALI's buffers on a GPU.
    "peak_memory_gb": Chart("Peak memory of a process, GB"),
}


def read_metrics(folder: Path) -> list[Metrics]:
    """Return the records in a run's metrics.jsonl, each with the fields of its line.

    Ignores an incomplete last line, as a crash leaves it. A null loss is read as NaN.
    """
    path = folder / "metrics.jsonl"
    *lines, last = read_bytes(path, MAX_METRICS).split(b"\n")
    records = [_parse(line, f"{path} line {number}") for number, line in enumerate(lines, 1)]
    with suppress(UserError):
        records.append(_parse(last, ""))
    return records


def _parse(line: bytes, where: str) -> Metrics:
    return parse_json(line[:MAX_LINE], Record, where).model_dump(exclude_unset=True)


def finite(metrics: Metrics) -> dict[str, Any]:
    """Return the metrics with None for what is not finite, which JSON cannot write."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }
