"""Weights to start from and how they are described: a run's, a file's, an export's, timm's and the Hugging Face Hub's.

A model of the Hub is named ``hf-hub:<user>/<name>[@revision]``, or as timm does, ``vit_tiny_patch16_224.augreg_in21k``.
"""

import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from common.checkpoint.model_state import EMA, MODEL
from common.checkpoint.save import CONFIG, MARKER
from common.checkpoint.saved_run import open_run
from common.config.model_arguments import timm_arguments
from common.errors import UserError, did_you_mean, first_line
from common.files import parse_json, read_json, regular_size
from common.hardware import memory_bytes

HUB = "hf-hub:"
CONNECT = 5.0  # seconds in which the Hub accepts a connection
WRAPPERS = ("state_dict", "model")  # under which timm, DeiT and others keep the parameters in a torch file


class Source(NamedTuple):
    """Parameters by timm's names, the attention heads, which their shapes do not tell, and timm's pretrained_cfg."""

    weights: dict[str, Tensor]
    heads: int | None
    preprocessing: Mapping[str, Any] = {}
    chosen: str = ""  # the checkpoint of a run, and why that one


# timm.create_model's other arguments load further files and unpickle them.
SHAPE = {"qkv_bias", "pre_norm", "fc_norm", "act_layer", "norm_layer", "in_chans", *timm_arguments()}


class Description(BaseModel):
    """config.json beside weights: a run's, or as timm and the Hub have it."""

    model_config = ConfigDict(extra="allow", strict=True)
    architecture: str = ""
    model_args: dict[str, Any] = Field({})
    pretrained_cfg: dict[str, Any] = Field({})
    label_names: list[str] | None = None
    config: dict[str, Any] = Field({})


def resolve_source(name: str) -> str:
    """Return ``hf-hub:<id>`` for a model of the Hub or of timm, an absolute path for all else."""
    if re.match("hf[-_]hub:", name):
        return HUB + name[len(HUB) :]
    if os.path.exists(name) or "/" in name:
        return str(Path(name).resolve())
    import timm  # takes a second
    from timm.models import get_pretrained_cfg

    if not timm.is_model(name.partition(".")[0]):
        return str(Path(name).resolve())
    known = timm.list_pretrained(f"{name.partition('.')[0]}.*")
    if "." in name and name not in known:
        raise UserError(
            f"{name}: timm has no such weights{did_you_mean(name, known)}; timm.list_pretrained() lists all"
        )
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
        chosen = "" if run.checkpoint == path.resolve() else f"{run.chosen}: {run.checkpoint.name}"
        return Source(run.load_weights(), run.config["MODEL"]["heads"], chosen=chosen)
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
    except UserError:
        raise
    except Exception as error:  # timm answers arguments that it does not take with many types
        raise UserError(f"{name}: its {CONFIG} cannot be read ({first_line(error)}): restore or remove it") from error


def _read_file(name: str, file: Path) -> dict[str, Tensor]:
    try:
        size = regular_size(file, memory_bytes())
        found = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # safetensors, torch and its unpickler have no type in common
        reason = (getattr(error, "strerror", None) or first_line(error)).removeprefix(f"{file}: ")
        if isinstance(error, pickle.UnpicklingError):  # torch's message advises to run the code in the file
            reason = "not by torch.save, or more than tensors, which is not read since it may run code"
        raise UserError(
            f"{name}: {file.name} holds no weights that can be read ({reason}): name a run, a checkpoint, a file of "
            "weights, a timm model, or hf-hub:<user>/<name>"
        ) from error
    found = next((found[key] for key in WRAPPERS if isinstance(found, Mapping) and key in found), found)
    if not (isinstance(found, Mapping) and found and all(isinstance(value, Tensor) for value in found.values())):
        raise UserError(f"{name}: {file.name} is no state_dict: save model.state_dict() alone")
    for key, tensor in found.items():
        is_stored = tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.nbytes <= size
        if not (isinstance(key, str) and is_stored and tensor.is_floating_point()):
            raise UserError(f"{name}: {file.name}: {str(key)[:100]} holds no floating-point numbers of its own")
    return dict(found)


def _read_description(file: Path) -> Mapping[str, Any]:
    """Return what describes the weights in ``file``: config.json beside a model's, else the file's own header."""
    beside = file.with_name(CONFIG)
    if file.name in (MODEL, EMA) and beside.is_file():
        return read_json(beside, Description).model_dump(exclude_unset=True)
    if file.suffix != ".safetensors":
        return {}
    with safe_open(file, "pt") as opened:
        header = (opened.metadata() or {}).get("config", "{}").encode()
    return parse_json(header, Description, str(file)).model_dump(exclude_unset=True)


def _open_hub(name: str) -> Source:
    from timm.models import load_model_config_from_hf, load_state_dict_from_hf

    hub_id, offline = name.removeprefix(HUB), _go_offline_without_hub()
    try:
        preprocessing, architecture, arguments = load_model_config_from_hf(hub_id)
        heads = _heads_of_timm(name, architecture, arguments)
        return Source(load_state_dict_from_hf(hub_id), heads, preprocessing)
    except UserError:
        raise
    except Exception as error:  # the Hub's, the network's and timm's have no type in common
        reason = offline or first_line(error)[:200]
        raise UserError(
            f"{name}: not a timm model that can be read from the Hugging Face Hub ({reason}): check name and network; "
            "a private one needs HF_TOKEN"
        ) from error


def _go_offline_without_hub() -> str:
    """Return why the Hub cannot be reached, and only use its cache then; an empty string if it can.

    Its client retries a connection that fails for 23 s, and one that is not answered for 6 minutes.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return ""
    try:
        get_session().head(constants.ENDPOINT, timeout=CONNECT)
    except Exception as error:  # httpx's, or requests' in older versions
        if type(error).__name__ in ("ConnectError", "ConnectTimeout", "ConnectionError"):
            constants.HF_HUB_OFFLINE = True
            return f"{constants.ENDPOINT} cannot be reached: {first_line(error)[:200]}"
    return ""


def _heads_of_timm(name: str, architecture: str, arguments: Mapping[str, Any]) -> int:
    """Return the heads of timm's ``architecture``; refuse one that computes something else than `build_model`'s."""
    import timm
    from timm.models.vision_transformer import VisionTransformer

    if not timm.is_model(architecture):
        raise UserError(f"{name}: architecture {architecture!r} is no model of timm's")
    with torch.device("meta"):
        if type(timm.create_model(architecture)) is not VisionTransformer:
            raise UserError(f"{name}: {architecture} is no plain Vision Transformer; choose a vit_* or deit3_*")
        shape: dict[str, Any] = {key: arguments[key] for key in arguments.keys() & SHAPE} | {"depth": 1}
        model = timm.create_model(architecture, **shape)  # blocks are alike
    block: Any = model.blocks[0]
    has_gelu = type(block.mlp.act) is nn.GELU and block.mlp.act.approximate == "none"
    has_norm = isinstance(block.norm1, nn.LayerNorm) and block.norm1.eps == 1e-6
    pools = model.global_pool == ("token" if model.has_class_token else "avg") and not model.pool_include_prefix
    if not (has_gelu and has_norm and pools):
        raise UserError(
            f"{name}: {architecture} has another activation, norm or pooling than the plain Vision Transformer; choose "
            "another"
        )
    return block.attn.num_heads
