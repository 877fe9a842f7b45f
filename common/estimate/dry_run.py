"""What ``--dry-run`` prints: the resolved config, the batch arithmetic, memory, and how the modes scale."""

from collections.abc import Mapping
from typing import Any

import torch

from common.colossal import compute_dtype, describe_tensor_parallel, name_dtype
from common.config.batch_plan import DataSummary, Plan
from common.estimate.cluster import LATENCY, Cluster
from common.estimate.scaling import (
    ASSUMED_MFU,
    USABLE,
    Prediction,
    assumed_flops,
    predict_modes,
    whole_model_flops,
)
from common.estimate.step_estimate import Rehearsal, rehearse
from common.hardware import instruction_set
from common.model.flops import flops_per_image
from common.model.vit import build_model, parameter_count
from common.table import format_table


def print_dry_run(config: Mapping[str, Any], plan: Plan, data: DataSummary | None, cluster: Cluster | None) -> None:
    """Print the config, a key a line, then the plan, then the table of all modes on ``cluster``, if there is one.

    ``data`` is None where no data set was named.
    """
    for name, value in config.items():
        print(f"{name:<22} {_inline(value)}")
    model = {**config["MODEL"], "num_classes": config["MODEL"]["num_classes"] or 1000}
    rows = {
        "processes": f"{plan.gpus} GPUs = {plan.data_parallel} data parallel x {plan.tensor_parallel} tensor parallel",
        "global batch": plan.batch_formula,
        "parameters": f"{parameter_count(**model) / 1e6:.1f} M",
        "arithmetic": f"{flops_per_image(model) / 1e9:.1f} GFLOP an image, forward and backward",
        "precision": _describe_precision(config, plan),
        "memory per GPU": _describe_memory(rehearse(config, plan.gpus, plan.micro_batch, plan.accumulation)),
        "data": f"{data.train_samples:,} training, {data.eval_samples:,} evaluation images, {data.num_classes} classes"
        if data
        else "not named (DATA=... or DATA.root): no steps counted",
    }
    if data:
        rows["steps"] = (
            f"{plan.steps_per_epoch} an epoch x {plan.epochs} = {plan.total_steps:,}, "
            f"{plan.warmup_steps:,} of them warm-up"
            + (f"; ends after {plan.last_step:,}" if plan.last_step < plan.total_steps else "")
        )
    print()
    for name, value in rows.items():
        print(f"{name:<22} {value}")
    with torch.device("meta"):
        lines = describe_tensor_parallel(config["parallel"], build_model(**model), plan.micro_batch)
    for line in lines:
        print(f"{'':<22} {line}")
    if cluster:
        _print_modes(config, plan, cluster)


def _describe_precision(config: Mapping[str, Any], plan: Plan) -> str:
    """Name the type that is computed in; on a CPU also that of the GPUs which the plan may be for."""
    if torch.cuda.is_available():
        return plan.dtype
    on_gpus = name_dtype(compute_dtype(config["fp16"], "cuda"))
    return f"{plan.dtype} on this CPU ({instruction_set()}), {on_gpus} on GPUs"


def _describe_memory(rehearsal: Rehearsal) -> str:
    return (
        f"{rehearsal.peak / 1e9:.2f} GB of tensors at the peak: {rehearsal.weights / 1e9:.2f} weights, "
        f"{rehearsal.gradients / 1e9:.2f} gradients, {rehearsal.optimizer / 1e9:.2f} optimiser state, "
        f"{rehearsal.activations / 1e9:.2f} activations and temporaries"
    )


def _print_modes(config: Mapping[str, Any], plan: Plan, cluster: Cluster) -> None:
    """Print the table of all modes, what it assumes, and the fastest that fits."""
    flops = whole_model_flops(config)
    rate = cluster.images_per_s * flops if cluster.images_per_s else assumed_flops(config)
    predictions = predict_modes(config, plan, cluster, rate)
    ideal = plan.total_batch / plan.gpus * flops / rate
    source = "measured" if cluster.images_per_s else f"assumed, {ASSUMED_MFU:.0%} of an H100's peak: --images-per-s"
    print(
        f"\nOne GPU trains {rate / flops:,.0f} images/s ({source}), a cut model at the same share of the peak; "
        f"nodes of {cluster.node}.\nA GPU sends {cluster.inside / 1e9:.0f} GB/s within its node and "
        f"{cluster.between / 1e9:.0f} GB/s beyond, a collective takes {1e6 * LATENCY:.0f} us at least, and DDP's "
        f"overlap with the last\nmicro-batch's backward pass (all assumed). Memory, up to {USABLE:.0%} of "
        f"{cluster.memory / 1e9:.0f} GB, and bytes are counted.\n"
    )
    print(format_table([_row(prediction, plan, cluster, ideal) for prediction in predictions]))
    fitting = [prediction for prediction in predictions if prediction.fits]
    if not fitting:
        print(f"\nnone fits into {cluster.memory / 1e9:.0f} GB")
        return
    best = min(fitting, key=lambda prediction: prediction.step)
    print(f"\nfastest that fits: {best.mode}, {plan.total_batch / best.step:,.0f} images/s")


def _row(prediction: Prediction, plan: Plan, cluster: Cluster, ideal: float) -> dict[str, str]:
    rehearsal = prediction.rehearsal
    inside, between = cluster.sent(rehearsal.nbytes)
    return {
        "mode": prediction.mode,
        "batch": f"{prediction.data_parallel} x {prediction.micro_batch} x {prediction.accumulation}",
        "parameters": f"{rehearsal.parameters / 1e6:.1f} M",
        "state, GB": f"{(rehearsal.weights + rehearsal.gradients + rehearsal.optimizer) / 1e9:.2f}",
        "activations, GB": f"{rehearsal.activations / 1e9:.2f}",
        "fits": "yes" if prediction.fits else "no",
        "sent in node, MB": f"{inside / 1e6:,.1f}",
        "beyond, MB": f"{between / 1e6:,.1f}",
        "step, ms": f"{1e3 * prediction.step:,.1f}",
        "images/s": f"{plan.total_batch / prediction.step:,.0f}",
        "efficiency": f"{ideal / prediction.step:.0%}",
    }


def _inline(value: Any) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in value.items()) if isinstance(value, Mapping) else repr(value)
