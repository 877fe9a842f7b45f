"""Which part of the model is trained."""

from typing import Any

from torch import nn

from common.model.vit import DropPath, parameter_count


def is_frozen(name: str, part: str | None) -> bool:
    """Return whether the parameter ``name`` is frozen by the config's FREEZE, ``part``."""
    return part == "body" and not name.startswith("head.")


def count_trained(part: str | None, **arguments: Any) -> int:
    """Count the trained parameters of `build_model(**arguments)`."""
    return parameter_count(**arguments) if part is None else (arguments["width"] + 1) * arguments["num_classes"]


def freeze(model: nn.Module, part: str | None) -> None:
    """Freeze everything but the head of a Vision Transformer in place, if ``part`` is "body".

    Frozen parameters require no gradient, so an optimizer built later skips them. Dropout and stochastic depth, which
    are in the body, are disabled: it computes as in evaluation. Call it before `shard_model`.
    """
    if part is None:
        return
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not is_frozen(name, part))
    for layer in model.modules():
        if isinstance(layer, DropPath):
            layer.rate = 0.0
        elif isinstance(layer, nn.Dropout):
            layer.p = 0.0
