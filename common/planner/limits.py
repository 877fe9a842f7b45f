"""Refuse plans that need more memory than any machine has."""

from collections.abc import Mapping
from typing import Any

from common.config.plan import Plan
from common.errors import UserError
from common.model.vit import count_trained, parameter_count
from common.optim.build import state_names

NO_MACHINE = 10**14  # bytes: more than any GPU or host has


def check_limits(config: Mapping[str, Any], plan: Plan, memory: float, place: str) -> None:
    """Raise `UserError` for a model or micro-batch that certainly needs more than ``memory`` bytes.

    ``place`` describes what has that memory. This is a lower bound: weights, gradients and moments in float32 (16 bits
    with APEX O3), and as activations one residual stream per block in 16 bits.
    """
    model = config["MODEL"] | {"num_classes": config["MODEL"]["num_classes"] or 1}
    tensor, fp16 = plan.tensor_parallel, config["fp16"] or {}
    parameters, number = parameter_count(**model), 2 if fp16.get("opt_level") == "O3" else 4
    moments = sum(name != "step" for name in state_names(config["OPTIMIZER"], "blocks.0.mlp.fc1.weight"))
    trained = count_trained(config["FREEZE"], **model)
    state = number * (parameters + trained * (1 + moments))
    state //= plan.gpus if config["zero"] else tensor
    if state > memory:
        raise UserError(
            f"MODEL.width={model['width']}, depth={model['depth']}, num_classes={model['num_classes']}: "
            f"{parameters:.3g} parameters take {_gigabytes(state)} per process, {place} has {_gigabytes(memory)}: "
            "use a smaller model, or split it over more GPUs (zero, tensor parallelism)"
        )
    tokens, blocks = (model["image_size"] // model["patch_size"]) ** 2, model["depth"]
    stream = 2 * tokens * model["width"] * (1 if model["activation_checkpoint"] or config["FREEZE"] else blocks)
    batch = plan.micro_batch * (12 * model["image_size"] ** 2 + stream) // tensor
    if batch > memory:
        raise UserError(
            f"TOTAL_BATCH_SIZE={plan.total_batch}: micro-batches of {plan.micro_batch:,} images take at least "
            f"{_gigabytes(batch)}, {place} has {_gigabytes(memory)}: set MICRO_BATCH_SIZE or gradient_accumulation"
        )


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
