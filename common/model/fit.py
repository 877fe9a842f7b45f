"""Fit the weights of one model to another: names, head, position embedding, pooling.

What cannot be fitted is refused with every key of MODEL that has to change.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from common.engine.linear_pairs import count_matrices
from common.engine.tensor_parallel.sharding import full_shape, local_state, persistent_buffers
from common.errors import UserError
from common.model.vit import VisionTransformer, resample_positions

# What only the pre-training of MAE uses.
PRETRAINING = ("decoder_", "mask_token")
MLP = "blocks.0.mlp.fc1.weight"
SHOWN = 3  # parameters that a note lists


def fit_weights(
    source: str,
    weights: dict[str, Tensor],
    model: nn.Module,
    heads: int | None,
    labels: Sequence[int | None],
    warning: str,
) -> list[str]:
    """Fit ``weights`` of ``source`` in place to ``model``; return what was done.

    ``heads`` are those of the model that the weights are of, None if not known. ``labels`` are its
    classes, in the order of those of ``model``. ``warning`` is returned if the head stays as it is.
    """
    notes = [_fit_pool(weights, model)]
    is_plain = isinstance(model, VisionTransformer)
    if is_plain:
        _check_shape(source, weights, heads or model.heads, model)
        if not heads:
            notes.append(f"MODEL.heads={model.heads}, which the weights do not tell")
    notes.append(convert_weights(weights, model))
    notes.append(_fit_head(weights, model, labels) or warning)
    if is_plain:
        notes.append(_fit_position(weights, model))
    check_weights(source, weights, model)
    return [note for note in notes if note]


def infer_model(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what the shapes of ``weights`` tell of MODEL; nothing if they are of no plain ViT.

    They do not tell ``image_size``, ``heads`` and ``num_classes``.
    """
    try:
        width, _, patch_size, _ = weights["patch_embed.proj.weight"].shape
        _, tokens, _ = weights["pos_embed"].shape
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        hidden = shapes[MLP][0]
        matrices = count_matrices(MLP, shapes)
        registers = weights["reg_token"].shape[1] if "reg_token" in weights else 0
    except (KeyError, ValueError, IndexError):
        return {}
    has_class = "cls_token" in weights
    return dict(
        patch_size=patch_size,
        width=width,
        depth=len({name.split(".")[1] for name in weights if name.startswith("blocks.")}),
        # Rounded up, because the model rounds width x mlp_ratio down.
        mlp_ratio=math.ceil(1e5 * hidden / width) / 1e5,
        mlp="swiglu" if matrices == 2 else "gelu",
        norm="layernorm" if "blocks.0.norm1.bias" in weights else "rmsnorm",
        pool="cls" if has_class else "avg",
        # Without positions of the prefix, their number is a square: that of the patches.
        no_embed_class=has_class + registers > 0 and math.isqrt(tokens) ** 2 == tokens,
        reg_tokens=registers,
        # DeiT III's value. Any will do, as the weights replace it.
        init_values=1e-6 if "blocks.0.ls1.gamma" in weights else None,
    )


def _check_shape(source: str, weights: Mapping[str, Tensor], heads: int, model: Any) -> None:
    """Refuse weights of another shape than ``model``; name every key of MODEL that has to change.

    What else differs, `check_weights` names by its parameters.
    """
    theirs = infer_model(weights) | {"heads": heads}
    own = infer_model(dict(model.named_parameters())) | {
        "heads": model.heads,
        "no_embed_class": model.embedded_prefix < model.prefix_tokens,
    }
    differing = [key for key in theirs if key in own and theirs[key] != own[key]]
    if differing:
        keys = ", ".join(f"MODEL.{key}={own[key]}" for key in differing)
        fitting = " ".join(f"--set MODEL.{key}={theirs[key]}" for key in differing)
        raise UserError(
            f"INIT={source}: its model differs from {keys}: {fitting} fits, or start from other "
            "weights"
        )


def convert_weights(weights: dict[str, Tensor], model: nn.Module) -> str:
    """Rename and resample ``weights`` as timm does for its model; return what was left out."""
    unused = [name for name in weights if name.startswith(PRETRAINING)]
    # timm keeps this function beside the class of the model.
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        # A copy: some of timm's functions remove entries while they convert.
        converted = dict(convert(dict(weights), model))
        weights.clear()
        weights |= converted
    for name in unused:
        weights.pop(name, None)  # timm's conversion may have left it out
    for name, buffer in persistent_buffers(model).items():
        # A file of parameters alone lacks the counters of batch norms.
        weights.setdefault(name, buffer)
    if not unused:
        return ""
    return f"without {len(unused)} parameters of pre-training: {', '.join(unused[:SHOWN])}"


def _fit_head(weights: dict[str, Tensor], model: Any, labels: Sequence[int | None]) -> str:
    """Order the rows of the head by ``labels``, or put in that of ``model``; return what was done.

    ``labels`` are the classes of the weights, None for one that they do not know.
    """
    own = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[0] in model.head_names
    }
    name = f"{model.head_names[0]}.weight"
    rows = list(range(len(own[name])))
    # A head may have more classes than the data set: their rows follow in their order.
    order = [*labels, *sorted({*rows} - {*labels})]
    fits = all(key in weights and weights[key].shape == own[key].shape for key in own)
    if fits and order == rows:
        return ""
    if fits and None not in order and sorted(order) == rows:
        weights |= {key: weights[key][order] for key in own}
        return "the rows of its head in the order of the data set's classes"
    instead = ""
    if name in weights:
        instead = f", not its {len(weights[name])}{' others' if fits else ''}"
    weights |= own
    return f"a new head of {len(rows)} classes{instead}"


def _fit_position(weights: dict[str, Tensor], model: Any) -> str:
    """Bring the position embedding to the grid of ``model``; return what was done."""
    saved = weights.get("pos_embed")
    own = model.pos_embed
    prefix = model.embedded_prefix
    if saved is None:
        return ""
    old, new = (math.isqrt(max(0, table.shape[1] - prefix)) for table in (saved, own))
    if old**2 + prefix != saved.shape[1]:
        return ""  # Another architecture: `check_weights` names all that differs.
    # Fixed positions are computed for any grid.
    if not own.requires_grad:
        weights["pos_embed"] = own.detach()
        return "fixed positions in place of its"
    if old == new:
        return ""
    weights["pos_embed"] = resample_positions(saved, new**2, prefix)
    return f"position embedding resampled to {new} x {new} patches from {old} x {old}"


def _fit_pool(weights: dict[str, Tensor], model: nn.Module) -> str:
    """Fit ``weights`` with a norm of every token to a ``model`` that averages the patches before
    its norm; return what was done.

    That norm begins anew, as in the fine-tuning of MAE. The class token is left out where ``model``
    has none, with its position.
    """
    own = dict(model.named_parameters())
    norm = {name: value.detach() for name, value in own.items() if name.startswith("fc_norm.")}
    has_both = "fc_norm.weight" in weights
    if not norm or has_both or "norm.weight" not in weights.keys() - own.keys():
        return ""
    for name in norm:
        del weights[name.removeprefix("fc_")]
    weights |= norm
    if "cls_token" in own or "cls_token" not in weights:
        return "a new norm for the mean of the patches"
    del weights["cls_token"]
    positions = weights["pos_embed"]
    # If their number is a square, the class token has none.
    if math.isqrt(positions.shape[1]) ** 2 != positions.shape[1]:
        weights["pos_embed"] = positions[:, 1:]
    return "a new norm for the mean of the patches, without its class token"


def check_weights(source: object, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise `UserError` unless ``weights``, of ``source``, are full and finite, as of ``model``."""
    check_shapes(source, weights, model)
    for name, tensor in weights.items():
        if not tensor.is_meta and not tensor.isfinite().all():
            raise UserError(
                f"{source}: {name} holds numbers that are not finite: start from other weights"
            )


def check_shapes(source: object, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise `UserError` naming what ``weights`` lack, have too many, or have in another shape."""
    saved = {name: list(tensor.shape) for name, tensor in weights.items()}
    wanted = {name: list(full_shape(shard)) for name, shard in local_state(model).items()}
    differing = [
        f"{name} {saved.get(name, 'missing')} (model: {wanted.get(name, 'none')})"
        for name in {**wanted, **saved}
        if saved.get(name) != wanted.get(name)
    ]
    if differing:
        count = len(differing) - SHOWN
        more = f", and {count} more" if count > 0 else ""
        raise UserError(
            f"{source} does not fit the model: {', '.join(differing[:SHOWN])}{more}; "
            "keep the MODEL it was trained with"
        )
