"""Refuse plans that need more memory than any machine has."""

from collections.abc import Mapping
from typing import Any

from common.config.plan import Plan
from common.errors import UserError
from common.model.build import build_on_meta, count_parameters
from common.optim.build import state_names

NO_MACHINE = 10**14  # bytes: more than any GPU or host has


def check_limits(config: Mapping[str, Any], plan: Plan, memory: float, place: str) -> None:
    """Raise `UserError` for a model or micro-batch that certainly needs more than ``memory`` bytes.

    ``place`` describes what has that memory. This is a lower bound: weights, gradients and moments in float32 (16 bits
    with APEX O3), and the images.
    """
    tensor, fp16 = plan.tensor_parallel, config["fp16"] or {}
    (parameters, trained), model = count_parameters(build_on_meta(config["MODEL"], config["FREEZE"])), config["MODEL"]
    number = 2 if fp16.get("opt_level") == "O3" else 4
    moments = sum(name != "step" for name in state_names(config["OPTIMIZER"], "blocks.0.mlp.fc1.weight"))
    state = number * (parameters + trained * (1 + moments))
    state //= plan.gpus if config["zero"] else tensor
    if state > memory:
        raise UserError(
            f"MODEL={dict(model)}: {parameters:.3g} parameters take {_gigabytes(state)} per process, {place} has "
            f"{_gigabytes(memory)}: "
            "use a smaller model, or split it over more GPUs (zero, tensor parallelism)"
        )
    batch = plan.micro_batch * 12 * model["image_size"] ** 2
    if batch > memory:
        raise UserError(
            f"TOTAL_BATCH_SIZE={plan.total_batch}: micro-batches of {plan.micro_batch:,} images take at least "
            f"{_gigabytes(batch)}, {place} has {_gigabytes(memory)}: set MICRO_BATCH_SIZE or gradient_accumulation"
        )


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
