"""The model of a config, and what timm calls it."""

from typing import Any

import torch
from torch import nn

from common.config.fields import parse
from common.config.model_keys import NOT_IN_TIMM, Model, TimmModel, pretrained_config
from common.files import Values
from common.model.timm_model import build_timm_model
from common.model.vit import VisionTransformer

# timm's plain ViTs by MODEL.mlp, for any shape: the arguments override all of their own.
PLAIN_VITS = {"gelu": "vit_base_patch16_224", "swiglu": "vit_giant_patch14_dinov2"}


def build_model(**arguments: object) -> nn.Module:
    """Build the model of the config's MODEL, initialised from torch's global random state.

    It maps float images [B, 3, image_size, image_size] to logits [B, num_classes]. Its attribute
    ``head_names`` names its head, or heads.

    Raises ValueError for an unknown name or an invalid value.
    """
    if arguments.get("timm"):
        return build_timm_model(**arguments)  # pyright: ignore[reportArgumentType]
    return VisionTransformer(parse(Model, arguments))


def build_on_meta(model: dict[str, Any], frozen: str | None = None) -> nn.Module:
    """Build the model of the config's MODEL without memory, with FREEZE applied."""
    with torch.device("meta"):
        built = build_model(**model)
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

    Frozen parameters require no gradient, so an optimizer built later skips them. The body computes
    as in evaluation: without dropout, with the batch norms' statistics. Call it before
    `shard_model`.
    """
    if part is None:
        return
    heads: Any = model.head_names
    for name, parameter in model.named_parameters():
        # head.weight and head.bias are of the layer "head".
        parameter.requires_grad_(name.rpartition(".")[0] in heads)
    for name, child in model.named_children():
        if not any(f"{head}.".startswith(f"{name}.") for head in heads):
            child.eval()
            child.train = _stay  # The trainer's `model.train()` would undo `eval`.


def _stay(mode: bool = True) -> Any:
    """Keep a frozen layer in evaluation mode."""


def timm_arguments(**arguments: Any) -> dict[str, Any]:
    """Return the arguments with which timm's `VisionTransformer` is the same model.

    They also override every shape in `timm.create_model(name, **arguments)` for any plain ViT's
    name.
    """
    a = parse(Model, arguments)
    swiglu = {}
    if a.mlp == "swiglu":
        from timm.layers import SwiGLUPacked  # takes a second

        # `create_model` drops None, and that architecture has a LayerScale, which 0 removes.
        factor = a.init_values or 0.0
        swiglu = {"mlp_layer": SwiGLUPacked, "act_layer": "silu", "init_values": factor}
    return {
        "img_size": a.image_size,
        "patch_size": a.patch_size,
        "embed_dim": a.width,
        "depth": a.depth,
        "num_heads": a.heads,
        "mlp_ratio": a.mlp_ratio,
        "num_classes": a.classes,
        # timm's rates for attention and head stay 0: this model has no dropout there.
        "pos_drop_rate": a.dropout,
        "proj_drop_rate": a.dropout,
        "drop_path_rate": a.drop_path,
        "global_pool": "token" if a.pool == "cls" else "avg",
        "class_token": a.pool == "cls",
        "no_embed_class": a.no_embed_class,
        "reg_tokens": a.reg_tokens,
        "init_values": a.init_values,
        "norm_layer": a.norm,
        **swiglu,
    }


def timm_architecture(timm: str | None = None, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """Return name and arguments with which `timm.create_model` builds MODEL; "none" if it cannot.

    Every plain ViT is one of `PLAIN_VITS` in other shapes.
    """
    if timm:
        options = {
            name: value for name, value in arguments.items() if name not in TimmModel.model_fields
        }
        if pretrained_config(timm).fixed_input_size:
            options["img_size"] = arguments["image_size"]
        return timm.partition(".")[0], options
    a = parse(Model, arguments)
    if not set(NOT_IN_TIMM).isdisjoint(a):
        return "none", arguments
    shapes = timm_arguments(**arguments)
    for rate in ("pos_drop_rate", "proj_drop_rate", "drop_path_rate"):
        del shapes[rate]  # Only training uses it.
    shapes.pop("mlp_layer", None)  # a class, which the architecture has
    return PLAIN_VITS[a.mlp], shapes


def describe_model(timm: str, arguments: Values, preprocessing: Values) -> dict[str, Any]:
    """Return MODEL, but for the number of classes, of what timm builds with ``arguments``.

    The inverse of `timm_architecture`. ``preprocessing`` is timm's pretrained_cfg.
    """
    # [C, Y, X]
    sizes = preprocessing.get("input_size", pretrained_config(timm).input_size)
    own = {
        key: value
        for key, value in arguments.items()
        if key not in ("img_size", "in_chans", "num_classes")
    }
    return {"timm": timm, "image_size": arguments.get("img_size") or sizes[-1], **own}


def resolve_preprocessing(timm: str, args: Values) -> dict[str, Any]:
    """Return how timm's train.py with ``args`` prepares the images of the model ``timm``."""
    from timm.data import resolve_data_config

    pretrained_cfg = pretrained_config(timm).to_dict()
    return resolve_data_config(args, pretrained_cfg) | {"classifier": pretrained_cfg["classifier"]}
