"""Fit the weights that a run starts from to its model.

A head for other classes is replaced, and the position embedding of another image size is resampled.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoint.model_state import check_architecture
from common.checkpoint.sources import infer_model, open_source
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
    notes = [_fit_head(weights, model), _fit_position(source, weights, model)]
    check_architecture(Path(source), weights, model)
    return weights, "; ".join(
        [f"starting from the weights of {source}{chosen and f' ({chosen})'}", *filter(None, notes)]
    )


def _check_shape(source: str, weights: Mapping[str, Tensor], heads: int | None, model: Any, heads_stated: bool) -> None:
    """Refuse weights of another shape than ``model`` in terms of MODEL's keys."""
    theirs, own = infer_model(source, weights), infer_model("", dict(model.named_parameters()))
    own["heads"] = own["width"] // model.blocks[0].attn.head_width
    theirs["heads"] = heads or own["heads"]
    patches = max(0, weights["pos_embed"].shape[1] - model.embedded_prefix)  # pyright: ignore
    own["no_embed_class"] = model.prefix_tokens > 0 and model.embedded_prefix == 0  # pyright: ignore
    if math.isqrt(patches) ** 2 == patches:
        theirs["no_embed_class"] = own["no_embed_class"]  # 9 positions are 3 x 3, or 2 x 2 and 5 of the prefix
    differing = [key for key in theirs if key != "image_size" and theirs[key] != own[key]]
    if differing:
        fitting = " ".join(f"--set MODEL.{key}={theirs[key]}" for key in differing)
        raise UserError(
            f"INIT={source}: its model differs from {', '.join(f'MODEL.{key}={own[key]}' for key in differing)}: "
            f"{fitting} fits, or start from other weights"
        )
    if heads is None and not heads_stated:
        raise UserError(
            f"INIT={source}: the weights do not tell their number of attention heads: confirm "
            f"--set MODEL.heads={own['heads']} or set another"
        )


def _fit_head(weights: dict[str, Tensor], model: Any) -> str | None:
    """Put the head of ``model`` in place of one for another number of classes."""
    saved, classes = weights.get("head.bias"), len(model.head.bias)
    if saved is not None and len(saved) == classes:
        return None
    weights |= {f"head.{name}": parameter.detach() for name, parameter in model.head.named_parameters()}
    return f"a new head of {classes} classes" + (f", not its {len(saved)}" if saved is not None else "")


def _fit_position(source: str, weights: dict[str, Tensor], model: Any) -> str | None:
    """Bring the position embedding to the grid of ``model``."""
    saved, own = weights["pos_embed"], model.pos_embed
    prefix: int = model.embedded_prefix  # pyright: ignore[reportAssignmentType]
    old, new = (math.isqrt(max(0, table.shape[1] - prefix)) for table in (saved, own))
    if old**2 + prefix != saved.shape[1]:
        return None  # another architecture, which is refused with all that differs
    if not own.requires_grad:  # fixed, and computed for any grid
        if not torch.allclose(saved.float(), build_sincos2d(old, own.shape[2], prefix), atol=1e-2):
            raise UserError(
                f"INIT={source}: its position embedding was learned: --set MODEL.position=learned, or start from others"
            )
        weights["pos_embed"] = own.detach()
        return None
    if old == new:
        return None
    from timm.layers import resample_abs_pos_embed  # timm takes a second to import

    weights["pos_embed"] = resample_abs_pos_embed(saved, [new, new], [old, old], prefix)
    return f"position embedding resampled to {new} x {new} patches from {old} x {old}"
