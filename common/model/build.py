"""The model of a config: built, described on the meta device, frozen."""

from typing import Any

import torch
from torch import nn

from common.config.model_arguments import parse_model_arguments
from common.model.vit import VisionTransformer


def build_model(**arguments: object) -> nn.Module:
    """Build the model of the config's MODEL, initialised from torch's global random state.

    It maps float images [B, 3, image_size, image_size] to logits [B, num_classes]. Its attribute ``classifier`` names
    the head.

    Raises ValueError for an unknown name or an invalid value.
    """
    return VisionTransformer(parse_model_arguments(arguments))


def build_on_meta(model: dict[str, Any], frozen: str | None = None) -> nn.Module:
    """Build the model of the config's MODEL without memory, with FREEZE applied; None as num_classes is 1000."""
    with torch.device("meta"):
        built = build_model(**model | {"num_classes": model.get("num_classes") or 1000})
    freeze(built, frozen)
    return built


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of all parameters, and of those that are trained."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def state_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Return the shapes of what a checkpoint holds of ``model``, by name."""
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


def freeze(model: nn.Module, part: str | None) -> None:
    """Freeze everything but the head in place, if ``part`` is "body".

    Frozen parameters require no gradient, so an optimizer built later skips them. The body computes as in evaluation:
    without dropout, with the batch norms' statistics. Call it before `shard_model`.
    """
    if part is None:
        return
    head: Any = model.classifier
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name.startswith(f"{head}."))
    for name, child in model.named_children():
        if name != head.partition(".")[0]:
            child.eval()
            child.train = _stay


def _stay(mode: bool = True) -> None:
    """Keep a frozen layer in evaluation mode."""
