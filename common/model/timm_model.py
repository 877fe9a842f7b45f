"""Models of timm's, by name."""

import inspect
import re
from typing import Any

import torch
from torch import nn

from common.config.model_keys import pretrained_config
from common.errors import UserError
from common.text import did_you_mean, first_line

# What would load files, what MODEL's own keys set, and what changes the inputs or the outputs;
# so do the other arguments of timm's functions.
NOT_TAKEN = {
    "args",
    "device",
    "dtype",
    "feature_cls",
    "features_only",
    "img_size",
    "in_chans",
    "num_classes",
    "out_indices",
    "pruned",
    "self",
    "weight_init",
}
LARGEST = 65536  # greatest integer that is taken: a run's config.json may come from anybody


def build_timm_model(
    timm: str,
    image_size: int,
    num_classes: int | None = None,
    sync_bn: bool = False,
    pretrained: bool = False,
    activation_checkpoint: bool = False,
    **arguments: Any,
) -> nn.Module:
    """Build timm's model ``timm`` with random weights.

    ``pretrained`` is not read here: it chooses INIT.

    Raises `UserError` for arguments that it does not take.
    """
    from timm import create_model
    from timm.layers import convert_sync_batchnorm
    from timm.models import build_model_with_cfg

    not_taken = NOT_TAKEN.union(
        inspect.signature(create_model).parameters,
        inspect.signature(build_model_with_cfg).parameters,
    )
    for name, value in arguments.items():
        if name in not_taken:
            raise UserError(f"MODEL.{name}: it may not be set here; leave it out")
        if not _is_plain(value):
            raise UserError(
                f"MODEL.{name}={value!r}: expected a number up to {LARGEST}, a text, None, or a "
                "list of them"
            )
    if pretrained_config(timm).fixed_input_size:
        arguments["img_size"] = image_size
    try:
        model: Any = create_model(timm, num_classes=num_classes or 1000, **arguments)
        if activation_checkpoint:
            model.set_grad_checkpointing()
    # What timm's models raise has no type in common.
    except Exception as error:
        # timm itself knows what it takes: the constructors of many models have **kwargs
        unknown = re.search(r"unexpected keyword argument.*'(\w+)'", str(error))
        if unknown and unknown[1] in arguments:
            taken = [name for name in _argument_names(timm) if name not in not_taken]
            known = did_you_mean(unknown[1], taken) or f"; it takes {', '.join(taken)}"
            raise UserError(f"MODEL.{unknown[1]}: {timm} takes no such argument{known}") from error
        raise UserError(
            f"MODEL.timm={timm!r}: timm does not build it ({first_line(error)})"
        ) from error
    heads = model.pretrained_cfg["classifier"]
    # A distilled model has two heads, one without classes none.
    model.head_names = (heads,) if isinstance(heads, str) else tuple(heads or ())
    # A plan, on the meta device, needs no statistics.
    if sync_bn and not next(model.parameters()).is_meta:
        # timm's, not torch's: that one drops the activation inside timm's batch norms.
        return convert_sync_batchnorm(model)
    return model


def _argument_names(timm: str) -> list[str]:
    """Return the named arguments of a model's class and those it inherits from."""
    from timm import create_model

    with torch.device("meta"):
        classes = type(create_model(timm)).__mro__
    return [*dict.fromkeys(name for each in classes for name in inspect.signature(each).parameters)]


def plain_heads(model: Any, timm: str) -> int:
    """Return the attention heads of timm's ``model``, which it calls ``timm``.

    The shapes of weights do not tell them, nor what is computed. So it raises `UserError` for a
    model that computes other than `common.model.vit.VisionTransformer`.
    """
    from timm.layers import RmsNorm
    from timm.models.vision_transformer import VisionTransformer

    if type(model) is not VisionTransformer:
        raise UserError(f"{timm} is no plain Vision Transformer; choose a vit_* or deit3_*")
    block: Any = model.blocks[0]
    mlp = block.mlp
    has_gelu = type(mlp.act) is nn.GELU and mlp.act.approximate == "none"
    # The gate of timm's GluMlp is the first half with `SwiGLUPacked` only.
    has_swiglu = type(mlp.act) is nn.SiLU and not getattr(mlp, "gate_last", True)
    has_norm = isinstance(block.norm1, nn.LayerNorm | RmsNorm) and block.norm1.eps == 1e-6
    pools = model.global_pool == ("token" if model.has_class_token else "avg")
    if not ((has_gelu or has_swiglu) and has_norm and pools) or model.pool_include_prefix:
        raise UserError(
            f"{timm} has another activation, norm or pooling than a plain Vision Transformer; "
            "choose another"
        )
    return block.attn.num_heads


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` is a number, a text, None, or a list of these."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, int):  # True and False too
        return value <= LARGEST
    return value is None or isinstance(value, str | float)
