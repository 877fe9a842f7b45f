"""Files of weights that other programs save: timm's train.py, DeiT, MAE, Lightning, and models that
DistributedDataParallel or torch.compile wrapped.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from common.model.build import describe_model, resolve_preprocessing

# Where a file keeps the parameters. The averages go before the weights, as in timm.
AVERAGES = ("state_dict_ema", "model_ema")
WEIGHTS = ("state_dict", "model")
# What wrappers put before the names, and torch.compile before those of a block.
PREFIXES = re.compile(r"^(?:(?:module|_orig_mod|model|backbone)\.)+|\b_orig_mod\.")


def read_torch_file(file: Path) -> Any:
    """Read what ``torch.save`` wrote: tensors, plain values, and the `argparse.Namespace` of timm's
    and DeiT's arguments.

    PyTorch refuses everything else, so no code in the file runs. Of a Namespace it sets the
    attributes only.
    """
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(file, "cpu", weights_only=True)


def unwrap_weights(saved: Any, file: str, raw: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Return the parameters in ``saved`` by the model's own names, and what was done to get them.

    ``raw`` takes the weights where there is a moving average too. Raises `UserError` for what is no
    state_dict, naming the ``file``.
    """
    keys = WEIGHTS if raw else AVERAGES + WEIGHTS
    entries = saved if isinstance(saved, Mapping) else {}
    key = next((key for key in keys if entries.get(key) is not None), None)
    weights = saved[key] if key else saved
    if not (
        isinstance(weights, Mapping)
        and weights
        and all(isinstance(value, Tensor) for value in weights.values())
    ):
        raise UserError(f"{file} is no state_dict: save model.state_dict() alone")
    prefixes = {prefix for name in weights for prefix in PREFIXES.findall(name)}
    unwrapped = {PREFIXES.sub("", name): value for name, value in weights.items()}
    notes = []
    if key in AVERAGES:
        notes.append(f"{key}, the moving average of its weights")
    if prefixes:
        notes.append(f"names without {', '.join(sorted(prefixes))}")
    return unwrapped, notes


def describe_arguments(saved: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return MODEL and timm's preprocessing as the arguments of timm's train.py or of DeiT's in
    ``saved`` tell them; nothing without them.
    """
    from timm import is_model  # takes a second

    arguments = saved.get("args")
    args = vars(arguments) if isinstance(arguments, argparse.Namespace) else {}
    name = args.get("model")
    if not isinstance(name, str) or not is_model(name):
        return {}, {}
    if isinstance(args.get("input_size"), int):  # DeiT's
        args = args | {"img_size": args["input_size"], "input_size": None}
    # Keywords of --model-kwargs reach timm as they are.
    arguments = dict(args.get("model_kwargs") or {})
    if args.get("gp"):
        arguments["global_pool"] = args["gp"]
    preprocessing = resolve_preprocessing(name, args)
    return describe_model(name, arguments, preprocessing), preprocessing
