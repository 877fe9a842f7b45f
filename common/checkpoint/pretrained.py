"""Load pretrained weights: of a run, a checkpoint, or a file with the parameters of the same architecture.

A head for other classes is replaced, and the position embedding of another image size is resampled.
"""

import math
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from common.checkpoint.model_state import MODEL, check_architecture
from common.checkpoint.save import MARKER
from common.checkpoint.saved_run import open_run
from common.errors import UserError
from common.model.vit import build_sincos2d

WRAPPERS = ("state_dict", "model")  # under which timm, DeiT and others keep the parameters in a torch file


def load_pretrained(model: nn.Module, source: str) -> str:
    """Give ``model``, which is whole, the weights of ``source`` as far as they fit; return what was done, in a line.

    ``source`` is a run or checkpoint of ours, a folder with model.safetensors, a .safetensors file, or one of torch's
    with a `state_dict` and nothing else to unpickle. Raises `UserError` for anything else, and for weights of another
    architecture or patch size.
    """
    weights = read_weights(source)
    _check_patches(source, weights, model)
    notes = [_fit_head(weights, model), _fit_position(source, weights, model)]
    check_architecture(Path(source), weights, model)
    model.load_state_dict(weights)
    return "; ".join([f"starting from the weights of {source}", *filter(None, notes)])


def read_weights(source: str) -> dict[str, Tensor]:
    """Return the parameters in ``source`` by timm's names; see `load_pretrained`."""
    path = Path(source)
    if (path / MARKER).is_file() or (path / "checkpoints").is_dir():
        return open_run(source).load_weights()
    file = path / MODEL if path.is_dir() else path
    try:
        found = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(
            f"INIT={source}: {file.name} holds no weights that can be read ({reason}): name a run, a checkpoint, a "
            ".safetensors file, or a state_dict that torch saved"
        ) from error
    found = next((found[key] for key in WRAPPERS if isinstance(found, Mapping) and key in found), found)
    if not (isinstance(found, Mapping) and found and all(isinstance(value, Tensor) for value in found.values())):
        raise UserError(f"INIT={source}: {file.name} is no state_dict: save model.state_dict() alone")
    return dict(found)


def _check_patches(source: str, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    size = model.patch_embed.proj.kernel_size[0]  # pyright: ignore[reportAttributeAccessIssue]
    saved = weights.get("patch_embed.proj.weight")
    if saved is not None and saved.ndim == 4 and saved.shape[-1] != size:
        raise UserError(
            f"INIT={source}: its patches have {saved.shape[-1]} pixels a side, MODEL.patch_size={size}: "
            f"--set MODEL.patch_size={saved.shape[-1]}, or start from other weights"
        )


def _fit_head(weights: dict[str, Tensor], model: nn.Module) -> str | None:
    """Put the head of ``model`` in place of one for another number of classes."""
    saved, classes = weights.get("head.bias"), len(model.head.bias)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    if saved is not None and len(saved) == classes:
        return None
    weights |= {f"head.{name}": parameter.detach() for name, parameter in model.head.named_parameters()}  # pyright: ignore[reportAttributeAccessIssue]
    return f"a new head of {classes} classes" + (f", not its {len(saved)}" if saved is not None else "")


def _fit_position(source: str, weights: dict[str, Tensor], model: nn.Module) -> str | None:
    """Bring the position embedding to the grid of ``model``."""
    saved, own = weights.get("pos_embed"), model.pos_embed
    if saved is None or saved.ndim != 3 or saved.shape[2] != own.shape[2]:
        return None  # another architecture, which is refused with all that differs
    prefix = int(model.cls_token is not None)
    old, new = (math.isqrt(table.shape[1] - prefix) for table in (saved, own))
    if old**2 + prefix != saved.shape[1]:
        return None
    if not own.requires_grad:  # fixed, and computed for any grid
        if not torch.allclose(saved.float(), build_sincos2d(old, own.shape[2], prefix), atol=1e-2):  # pyright: ignore[reportArgumentType]
            raise UserError(
                f"INIT={source}: its position embedding was learned: --set MODEL.position=learned, or start from others"
            )
        weights["pos_embed"] = own.detach()  # pyright: ignore[reportCallIssue]
        return None
    if old == new:
        return None
    from timm.layers import resample_abs_pos_embed  # timm takes a second to import

    weights["pos_embed"] = resample_abs_pos_embed(saved, [new, new], [old, old], prefix)
    return f"position embedding resampled to {new} x {new} patches from {old} x {old}"
