"""Weights to start from and how they are described: a run's, a file's, an export's, timm's and the Hugging Face Hub's.

A model of the Hub is named ``hf-hub:<user>/<name>[@revision]``, or as timm does, ``vit_tiny_patch16_224.augreg_in21k``.
"""

import json
import math
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from common.checkpoint.model_state import EMA, MODEL
from common.checkpoint.save import CONFIG, MARKER
from common.checkpoint.saved_run import open_run
from common.errors import UserError, did_you_mean, first_line

HUB = "hf-hub:"
WRAPPERS = ("state_dict", "model")  # under which timm, DeiT and others keep the parameters in a torch file


class Source(NamedTuple):
    """Parameters by timm's names, the attention heads, which their shapes do not tell, and timm's pretrained_cfg."""

    weights: dict[str, Tensor]
    heads: int | None
    preprocessing: Mapping[str, Any] = {}


def resolve_source(name: str) -> str:
    """Return ``hf-hub:<id>`` for a model of the Hub or of timm, an absolute path for all else."""
    if re.match("hf[-_]hub:", name):
        return HUB + name[len(HUB) :]
    if Path(name).exists() or "/" in name:
        return str(Path(name).resolve())
    import timm  # takes a second
    from timm.models import get_pretrained_cfg

    if not timm.is_model(name.partition(".")[0]):
        return str(Path(name).resolve())
    known = timm.list_pretrained(f"{name.partition('.')[0]}.*")
    if "." in name and name not in known:
        raise UserError(f"{name}: timm has no such weights{did_you_mean(name, known)}; known are {', '.join(known)}")
    cfg = get_pretrained_cfg(name)
    if cfg is None or not cfg.hf_hub_id:
        raise UserError(f"{name}: timm has no weights of it on the Hugging Face Hub; choose another")
    return HUB + cfg.hf_hub_id


def open_source(name: str) -> Source:
    """Read the weights that `resolve_source` named; raise `UserError` for what holds none of a Vision Transformer."""
    if name.startswith(HUB):
        return _open_hub(name)
    path = Path(name)
    if (path / MARKER).is_file() or (path / "checkpoints").is_dir():
        run = open_run(name)
        return Source(run.load_weights(), run.config["MODEL"]["heads"])
    file = path / MODEL if path.is_dir() else path
    weights = _read_file(name, file)
    try:
        about = _read_description(file)
        if "config" in about:  # a run's
            return Source(weights, about["config"]["MODEL"]["heads"])
        if "architecture" not in about:
            return Source(weights, None)
        heads = _heads_of_timm(name, about["architecture"], about.get("model_args", {}))
        return Source(weights, heads, {**about.get("pretrained_cfg", about), "label_names": about.get("label_names")})
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name}: its {CONFIG} cannot be read ({first_line(error)}): restore or remove it") from error


def _read_file(name: str, file: Path) -> dict[str, Tensor]:
    try:
        found = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(
            f"{name}: {file.name} holds no weights that can be read ({reason}): name a run, a checkpoint, a "
            ".safetensors file, a state_dict that torch saved, a model of timm's, or hf-hub:<user>/<name>"
        ) from error
    found = next((found[key] for key in WRAPPERS if isinstance(found, Mapping) and key in found), found)
    if not (isinstance(found, Mapping) and found and all(isinstance(value, Tensor) for value in found.values())):
        raise UserError(f"{name}: {file.name} is no state_dict: save model.state_dict() alone")
    return dict(found)


def _read_description(file: Path) -> Mapping[str, Any]:
    """Return what describes the weights in ``file``: config.json beside a model's, else the file's own header."""
    beside = file.with_name(CONFIG)
    if file.name in (MODEL, EMA) and beside.is_file():
        return json.loads(beside.read_text())
    if file.suffix != ".safetensors":
        return {}
    with safe_open(file, "pt") as opened:
        return json.loads((opened.metadata() or {}).get("config", "{}"))


def _open_hub(name: str) -> Source:
    from timm.models import load_model_config_from_hf, load_state_dict_from_hf

    hub_id = name.removeprefix(HUB)
    try:
        preprocessing, architecture, arguments = load_model_config_from_hf(hub_id)
        heads = _heads_of_timm(name, architecture, arguments)
        return Source(load_state_dict_from_hf(hub_id), heads, preprocessing)
    except UserError:
        raise
    except Exception as error:  # the Hub's, the network's and timm's have no type in common
        raise UserError(
            f"{name}: not a model of timm's that can be read from the Hugging Face Hub ({first_line(error)}): check "
            "the name and the network; for a private model set HF_TOKEN"
        ) from error


def _heads_of_timm(name: str, architecture: str, arguments: Mapping[str, Any]) -> int:
    """Return the heads of timm's ``architecture``; refuse one that computes something else than `build_model`'s."""
    import timm
    from timm.models.vision_transformer import VisionTransformer

    with torch.device("meta"):
        model = timm.create_model(architecture, **arguments)
    if type(model) is not VisionTransformer:
        raise UserError(f"{name}: {architecture} is no plain Vision Transformer; choose a vit_*")
    block, pool = model.blocks[0], "token" if model.has_class_token else "avg"
    is_gelu = type(block.mlp.act) is nn.GELU and block.mlp.act.approximate == "none"
    if not (
        is_gelu and isinstance(block.norm1, nn.LayerNorm) and block.norm1.eps == 1e-6 and model.global_pool == pool
    ):
        raise UserError(
            f"{name}: {architecture} has another activation, norm or pooling than the plain Vision Transformer of this "
            "project; choose another"
        )
    return block.attn.num_heads


def infer_model(name: str, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what the shapes of ``weights`` tell of MODEL: all of its shape but ``heads`` and ``num_classes``."""
    try:
        width, _, patch_size, _ = weights["patch_embed.proj.weight"].shape
        _, tokens, _ = weights["pos_embed"].shape
        hidden = len(weights["blocks.0.mlp.fc1.weight"])
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"{name}: no Vision Transformer with timm's parameter names ({first_line(error)}); choose other weights"
        ) from error
    depth = len({key.split(".")[1] for key in weights if key.startswith("blocks.")})
    pool, ratio = "cls" if "cls_token" in weights else "avg", hidden / width
    ratio = ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)
    side = math.isqrt(tokens - (pool == "cls"))
    return dict(
        image_size=side * patch_size, patch_size=patch_size, width=width, depth=depth, mlp_ratio=ratio, pool=pool
    )
