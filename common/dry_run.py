"""What ``--dry-run`` prints: the resolved config, the batch arithmetic, parameters and memory per GPU."""

from collections.abc import Mapping
from typing import Any

import torch

from common.colossal import describe_tensor_parallel
from common.model import build_model, parameter_count
from common.plan import DataSummary, Plan

# float32 state per parameter, in tensors: LAMB and AdamW keep two moments, SGD one
MOMENTS = {"lamb": 2, "adamw": 2, "sgd": 1}


def print_dry_run(config: Mapping[str, Any], plan: Plan, data: DataSummary | None) -> None:
    """Print the config, a key a line, then the plan; ``data`` is None where no data set was named."""
    for name, value in config.items():
        print(f"{name:<22} {_inline(value)}")
    model = {**config["MODEL"], "num_classes": config["MODEL"]["num_classes"] or 1000}
    parameters = parameter_count(**model)
    weights, activations = estimate_memory(model, config["OPTIMIZER"]["name"], plan.micro_batch, bool(config["fp16"]))
    rows = {
        "processes": f"{plan.gpus} GPUs = {plan.data_parallel} data parallel x {plan.tensor_parallel} tensor parallel",
        "global batch": plan.batch_formula,
        "parameters": f"{parameters / 1e6:.1f} M",
        "memory per GPU": f"about {(weights + activations) / 1e9:.1f} GB: {weights / 1e9:.1f} GB of weights, gradients "
        f"and optimiser state, {activations / 1e9:.1f} GB of activations (estimated"
        f"{', of a model that is not cut' if plan.tensor_parallel > 1 else ''})",
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


def estimate_memory(model: Mapping[str, Any], optimizer: str, micro_batch: int, half: bool) -> tuple[float, float]:
    """Return (bytes of weights, gradients and optimiser state; bytes of activations kept for backward) of one GPU.

    Counts what a block keeps for backward with fused attention. In mixed precision (``half``) matrix products keep
    2 bytes a number and the residual stream, which layer norms read, 4; autocast also keeps a half copy of the weights.
    """
    parameters = parameter_count(**model)
    state = parameters * (4 * (2 + MOMENTS[optimizer]) + (2 if half else 0))
    tokens = (model["image_size"] // model["patch_size"]) ** 2 + 1
    width, hidden = model["width"], model["width"] * model["mlp_ratio"]
    number = 2 if half else 4
    norm_inputs = 2 * width * 4
    products = (2 * width + 3 * width + width + 2 * hidden) * number  # norms out, q k v, attention out, MLP in and out
    masks = (2 * width + hidden) if model["dropout"] else 0
    block = tokens * (norm_inputs + products + masks)
    kept = tokens * width * 4 * model["depth"] + block if model["activation_checkpoint"] else block * model["depth"]
    return state, micro_batch * kept


def _inline(value: Any) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in value.items()) if isinstance(value, Mapping) else repr(value)
