"""Fit the weights that a run starts from to its model.

A head for other classes is replaced, and the position embedding of another image size is resampled.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoint.model_state import check_architecture, infer_model
from common.checkpoint.sources import open_source
from common.errors import UserError
from common.model.vit import build_sincos2d


def load_pretrained(model: nn.Module, source: str) -> str:
    """Give ``model``, which is whole, the weights that `fit_pretrained` returns; return its line."""
    weights, done = fit_pretrained(model, source)
    model.load_state_dict(weights)
    return done


def fit_pretrained(model: nn.Module, source: str, *, heads_stated: bool = True) -> tuple[dict[str, Tensor], str]:
    """Return the weights of ``source`` as far as they fit ``model``, and what was done to them, in a line.

    ``source`` is a run or checkpoint of ours, a folder with model.safetensors, a .safetensors file, one of torch's
    with a `state_dict` and nothing else to unpickle, or ``hf-hub:<id>``. Raises `UserError` for anything else, for
    weights of another architecture, and, unless ``heads_stated``, where only the user can know the number of heads.
    """
    try:
        weights, heads, _, chosen = open_source(source)
    except UserError as error:
        raise UserError(f"INIT={error}") from error
    _check_shape(source, weights, heads, model, heads_stated)
    notes = [_fit_head(weights, model), _fit_position(weights, model)]
    check_architecture(Path(source), weights, model)
    return weights, "; ".join(
        [f"starting from the weights of {source}{chosen and f' ({chosen})'}", *filter(None, notes)]
    )


def _check_shape(source: str, weights: Mapping[str, Tensor], heads: int | None, model: Any, heads_stated: bool) -> None:
    """Refuse weights of another shape than ``model``; name every key of MODEL that has to change."""
    theirs, own = infer_model(source, weights), infer_model("", dict(model.named_parameters()))
    own["heads"] = own["width"] // model.blocks[0].attn.head_width
    theirs["heads"] = heads or own["heads"]
    patches = max(0, weights["pos_embed"].shape[1] - model.embedded_prefix)  # pyright: ignore
    own["no_embed_class"] = model.prefix_tokens > 0 and model.embedded_prefix == 0  # pyright: ignore
    if math.isqrt(patches) ** 2 == patches:
        theirs["no_embed_class"] = own["no_embed_class"]  # 9 positions are 3 x 3, or 2 x 2 and 5 of the prefix
    own["position"] = theirs["position"] = "learned"
    if not model.pos_embed.requires_grad:
        own["position"], theirs["position"] = "sincos2d", _position_of(weights["pos_embed"], theirs)
    if own["image_size"] % theirs["patch_size"] == 0:
        del theirs["image_size"]  # the position embedding is resampled
    differing = [key for key in theirs if theirs[key] != own[key]]
    fitting = " ".join(f"--set MODEL.{key}={theirs[key]}" for key in differing)
    unknown, width = heads is None and (not heads_stated or theirs["width"] % own["heads"] != 0), theirs["width"]
    if differing:
        more = f"; set MODEL.heads too, which the weights do not tell (often width / 64: {width / 64:g})" * unknown
        raise UserError(
            f"INIT={source}: its model differs from {', '.join(f'MODEL.{key}={own[key]}' for key in differing)}: "
            f"{fitting} fits, or start from other weights{more}"
        )
    if unknown:
        raise UserError(
            f"INIT={source}: the weights do not tell their number of attention heads: confirm "
            f"--set MODEL.heads={own['heads']} or set another"
        )


def _position_of(saved: Tensor, model: Mapping[str, Any]) -> str:
    """Return MODEL.position of a table of positions; ``model`` is its model's shape."""
    side = model["image_size"] // model["patch_size"]
    fixed = build_sincos2d(side, model["width"], max(0, saved.shape[1] - side**2))
    is_fixed = fixed.shape == saved.shape and torch.allclose(saved.float(), fixed, atol=1e-2)
    return "sincos2d" if is_fixed else "learned"


def _fit_head(weights: dict[str, Tensor], model: Any) -> str | None:
    """Put the head of ``model`` in place of one for another number of classes."""
    saved, classes = weights.get("head.bias"), len(model.head.bias)
    if saved is not None and len(saved) == classes:
        return None
    weights |= {f"head.{name}": parameter.detach() for name, parameter in model.head.named_parameters()}
    return f"a new head of {classes} classes" + (f", not its {len(saved)}" if saved is not None else "")


def _fit_position(weights: dict[str, Tensor], model: Any) -> str | None:
    """Bring the position embedding to the grid of ``model``."""
    saved, own = weights["pos_embed"], model.pos_embed
    prefix: int = model.embedded_prefix  # pyright: ignore[reportAssignmentType]
    old, new = (math.isqrt(max(0, table.shape[1] - prefix)) for table in (saved, own))
    if old**2 + prefix != saved.shape[1]:
        return None  # another architecture, which is refused with all that differs
    if not own.requires_grad:  # fixed, and computed for any grid
        weights["pos_embed"] = own.detach()
        return None
    if old == new:
        return None
    from timm.layers import resample_abs_pos_embed  # timm takes a second to import

    weights["pos_embed"] = resample_abs_pos_embed(saved, [new, new], [old, old], prefix)
    return f"position embedding resampled to {new} x {new} patches from {old} x {old}"
