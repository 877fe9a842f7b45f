"""Which part of the model is trained."""

from torch import nn

from common.model.vit import DropPath


def is_frozen(name: str, part: str | None) -> bool:
    """Return whether the config's FREEZE, ``part``, freezes the parameter ``name``."""
    return part == "body" and not name.startswith("head.")


def freeze(model: nn.Module, part: str | None) -> None:
    """Freeze a Vision Transformer in place but for its head, if ``part`` is "body".

    Frozen parameters take no gradient, so that an optimizer that is built later leaves them out. Dropout and stochastic
    depth, which are in the body, are switched off: it computes as in evaluation. Call it before `shard_model`.
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
