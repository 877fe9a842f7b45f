"""``--dry-run``: print the resolved config, the batch arithmetic, memory, and predictions for all parallel modes."""

import textwrap
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from common.colossal import compute_dtype, describe_tensor_parallel, name_dtype
from common.config.batch_plan import DataSummary, Plan
from common.errors import counted
from common.estimate.cluster import LATENCY, Cluster
from common.estimate.scaling import (
    ASSUMED_MFU,
    BEST_MFU,
    USABLE,
    Prediction,
    assumed_flops,
    predict_modes,
    whole_model_flops,
)
from common.estimate.step_estimate import StepEstimate, estimate_step
from common.hardware import instruction_set
from common.model.flops import flops_per_image
from common.model.freeze import count_trained
from common.model.vit import build_model, parameter_count
from common.table import flatten

WIDTH, INDENT = 80, 23
UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}
IMAGENET = 1_281_167  # training images of ImageNet-1k


def print_dry_run(
    config: Mapping[str, Any],
    plan: Plan,
    data: DataSummary | None,
    cluster: Cluster | None,
    notes: dict[str, str] | None = None,
    images: int = IMAGENET,
) -> None:
    """Print the config, one key per line in ``--set`` syntax, the plan, and the table of all modes on ``cluster``.

    ``data`` is None without a data set: an epoch then has ``images``. ``notes`` are additional rows of the plan; empty
    ones are skipped. Without ``cluster`` there is no table.
    """
    flat = flatten(config)
    width = max(map(len, flat))
    for name, value in flat.items():
        print(f"{name:<{width}}  {value if isinstance(value, Enum) else repr(value)}")
    print()
    for name, value in (_describe_plan(config, plan, data) | (notes or {})).items():
        if value:
            _print_wrapped(name, value)
    if plan.tensor_parallel > 1:
        with torch.device("meta"):
            model = build_model(**_model(config))
        _print_wrapped("each rank holds", describe_tensor_parallel(config["parallel"], model, plan.micro_batch))
    if cluster:
        _print_modes(config, plan, data.train_samples if data else images, cluster)


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config["MODEL"], "num_classes": config["MODEL"]["num_classes"] or 1000}


def _print_wrapped(name: str, text: str) -> None:
    print(textwrap.fill(f"{name:<{INDENT}}{text}", WIDTH, subsequent_indent=" " * INDENT, break_on_hyphens=False))


def _describe_plan(config: Mapping[str, Any], plan: Plan, data: DataSummary | None) -> dict[str, str]:
    cut = f"{plan.data_parallel} data parallel x {plan.tensor_parallel} tensor parallel"
    cut += f", zero stage {config['zero']['stage']}" if config["zero"] else ""
    rows = {
        "processes": f"{counted(plan.gpus, 'GPU')} = {cut}",
        "global batch": plan.batch_formula(),
        "parameters": _describe_parameters(config),
        "computation": f"{flops_per_image(_model(config), config['FREEZE']) / 1e9:.1f} GFLOP per image, "
        "forward and backward",
        "precision": _describe_precision(config, plan),
        **_describe_layer_decay(config),
        "memory per GPU": _describe_memory(estimate_step(config, plan.gpus, plan.micro_batch, plan.accumulation)),
    }
    if data is None:
        return rows | {"data": "none (set DATA=... or DATA.root): steps are not counted"}
    images = f"{data.train_samples:,} training, {data.eval_samples:,} evaluation images, {data.num_classes} classes"
    end = f"; ends after {plan.last_step:,}" if plan.last_step < plan.total_steps else ""
    steps = f"{plan.steps_per_epoch} per epoch x {plan.epochs} = {plan.total_steps:,}, {plan.warmup_steps:,} of warm-up"
    return rows | {"data": images, "steps": steps + end}


def _describe_parameters(config: Mapping[str, Any]) -> str:
    model = _model(config)
    count, trained = parameter_count(**model), count_trained(config["FREEZE"], **model)
    return f"{count:,} ({count / 1e6:.1f} M)" + (f", trained: {trained:,} of the head" if config["FREEZE"] else "")


def _describe_layer_decay(config: Mapping[str, Any]) -> dict[str, str]:
    decay, layers = config["OPTIMIZER"].get("layer_decay", 1.0), config["MODEL"]["depth"] + 1
    if decay == 1:
        return {}
    lowest = f"{decay:g}^{layers} = {decay**layers:.2g}"
    return {"learning rates": f"{lowest} (embeddings) to 1 (head) x {config['LEARNING_RATE']:g}"}


def _describe_precision(config: Mapping[str, Any], plan: Plan) -> str:
    """Return the compute dtype; on a CPU, also that on GPUs, for which the plan may be."""
    if torch.cuda.is_available():
        return plan.dtype
    on_gpus = name_dtype(compute_dtype(config["fp16"], "cuda"))
    return f"{plan.dtype} on this CPU ({instruction_set()}), {on_gpus} on GPUs"


def _describe_memory(estimate: StepEstimate) -> str:
    unit, size = _memory_unit(estimate.peak)
    return (
        f"{estimate.peak / size:.2f} {unit} at the peak: {estimate.weights / size:.2f} weights, "
        f"{estimate.gradients / size:.2f} gradients, {estimate.optimizer / size:.2f} optimizer, "
        f"{estimate.activations / size:.2f} activations and temporaries"
    )


def _memory_unit(most: float) -> tuple[str, float]:
    return ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)


def _print_modes(config: Mapping[str, Any], plan: Plan, images: int, cluster: Cluster) -> None:
    """Print the assumptions, the table of all modes, and the fastest mode that fits."""
    rate = cluster.images_per_s * whole_model_flops(config) if cluster.images_per_s else assumed_flops(config)
    predictions = predict_modes(config, plan, cluster, rate)
    print()
    for line in _assumptions(rate, cluster):
        print(textwrap.fill(line, WIDTH, initial_indent="- ", subsequent_indent="  "))
    print()
    unit = _memory_unit(max(prediction.estimate.peak for prediction in predictions))
    _print_columns([_row(prediction, plan, cluster, *unit) for prediction in predictions])
    print()
    fitting = [prediction for prediction in predictions if prediction.fits]
    if not fitting:
        print(f"no mode fits in {cluster.memory / 1e9:.0f} GB")
        return
    if not predictions[0].fits and (sharded := [p.zero for p in fitting if p.zero and not p.tensor["mode"]]):
        print(f"data parallel does not fit in {cluster.memory / 1e9:.0f} GB: set zero=dict(stage={min(sharded)})")
    best = min(fitting, key=lambda prediction: prediction.step)
    print(f"fastest that fits: {best.mode}, {_images_per_s(best, plan)} images/s")
    times = sorted(plan.epochs * images / plan.total_batch * step for step in (best.step, best.fastest_step))
    print(f"{plan.epochs} epochs of {images:,} images: {_duration(times)}, without evaluation")


def _duration(seconds: Sequence[float]) -> str:
    unit, size = next((unit, size) for unit, size in UNITS.items() if seconds[0] >= size or size == 1)
    times = [value / size for value in seconds]
    return f"{_range(times, '.2g' if times[0] < 10 else ',.0f')} {unit}"


def _assumptions(flops_per_s: float, cluster: Cluster) -> list[str]:
    if cluster.images_per_s:
        speed = f"A GPU trains {cluster.images_per_s:,.0f} images/s (measured)."
    else:
        best = flops_per_s * BEST_MFU / ASSUMED_MFU
        speed = (
            f"A GPU computes {flops_per_s / 1e12:,.0f} to {best / 1e12:,.0f} TFLOP/s: {ASSUMED_MFU:.0%} to "
            f"{BEST_MFU:.0%} of an H100's peak (assumed; measure images/s and pass --images-per-s)."
        )
    return [
        speed + " A GPU with a shard of the model reaches the same fraction of its peak.",
        "A micro-batch takes at least 1 ms per block, the time to launch its kernels (assumed).",
        f"A GPU sends {cluster.inside / 1e9:.0f} GB/s within its node of {cluster.node} and "
        f"{cluster.between / 1e9:.0f} GB/s beyond (--links); a collective takes at least {1e6 * LATENCY:.0f} us. "
        "The slower time assumes no overlap of computation and communication.",
        f"The host decodes {cluster.decode:,.0f} images/s per GPU (assumed; --decode-images-per-s).",
        f"Memory and bytes are counted; {USABLE:.0%} of {cluster.memory / 1e9:.0f} GB is usable.",
    ]


def _row(prediction: Prediction, plan: Plan, cluster: Cluster, unit: str, size: float) -> dict[str, str]:
    estimate = prediction.estimate
    inside, between = cluster.sent(estimate.nbytes)
    row = {
        "mode": prediction.mode,
        "batch": f"{prediction.data_parallel}x{prediction.micro_batch}x{prediction.accumulation}",
        f"memory {unit}": f"{estimate.peak / size:.2f}",
        f"sent {unit}": f"{inside / size:.2f}+{between / size:.2f}",
        "step ms": "does not fit",
        "images/s": "",
    }
    if prediction.fits:
        row["step ms"] = _range([1e3 * prediction.fastest_step, 1e3 * prediction.step], ",.0f")
        row["images/s"] = _images_per_s(prediction, plan)
    return row


def _images_per_s(prediction: Prediction, plan: Plan) -> str:
    return _range([plan.total_batch / seconds for seconds in (prediction.step, prediction.fastest_step)], ",.0f")


def _range(values: Sequence[float], form: str) -> str:
    low, high = (format(value, form) for value in values)
    return low if low == high else f"{low}-{high}"


def _print_columns(rows: Sequence[Mapping[str, str]]) -> None:
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]]
    for cells in [list(rows[0]), *(list(row.values()) for row in rows)]:
        first, *others = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        print("  ".join([f"{first.strip():<{widths[0]}}", *others]).rstrip())
