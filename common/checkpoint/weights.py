"""Weights to start from: a run's, a file's, an export's, timm's and the Hub's.

A model of the Hugging Face Hub is named ``hf-hub:<user>/<name>[@revision]``, or as timm does,
``vit_tiny_patch16_224.augreg_in21k``. A head for other classes is replaced, and the position
embedding of another image size is resampled.
"""

import json
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from common.checkpoint.content import CONFIG, EMA, MARKER, MODEL, RAW
from common.checkpoint.foreign_weights import describe_arguments, read_torch_file, unwrap_weights
from common.checkpoint.saved_run import SavedRun, open_run
from common.config.load import REQUIRED, parse_settings, restore_config
from common.config.model_keys import data_of, pretrained_config
from common.errors import UserError
from common.files import Values, read_bytes
from common.model.build import (
    build_model,
    build_on_meta,
    describe_model,
    resolve_preprocessing,
)
from common.model.classes import match_head, name_classes
from common.model.fit import check_weights, convert_weights, fit_weights
from common.model.timm_model import plain_heads
from common.model.vit import VisionTransformer
from common.text import first_line

HUB = "hf-hub:"
BATCH = 64  # images that are evaluated at once, unless ``MICRO_BATCH_SIZE`` is set


class OpenedWeights(NamedTuple):
    """Parameters by timm's names, what is known of their MODEL, and timm's pretrained_cfg.

    A run's ``preprocessing`` has the names of its classes only.
    """

    weights: dict[str, Tensor]
    model: Values
    preprocessing: Mapping[str, Any] = {}
    chosen: str = ""  # the checkpoint of a run and why that one, or the part of a file


def resolve_source(name: str, is_timm: bool = False) -> str:
    """Return ``hf-hub:<id>`` for a model of the Hub or of timm, an absolute path for all else.

    A path goes before a name of timm's, unless ``is_timm``.
    """
    if re.match("hf[-_]hub:", name):
        return HUB + name[len(HUB) :]
    if "/" not in name and (is_timm or not os.path.exists(name)):
        import timm  # takes a second

        if timm.is_model(name.partition(".")[0]):
            cfg = pretrained_config(name)
            if not cfg.hf_hub_id:
                raise UserError(
                    f"{name}: timm has no weights of it on the Hugging Face Hub; choose another"
                )
            return HUB + cfg.hf_hub_id
    # links stay: a run's `best`, files of the Hub's cache
    return os.path.abspath(os.path.expanduser(name))


def open_source(name: str, *, raw: bool = False) -> OpenedWeights:
    """Read the weights that `resolve_source` named; raise `UserError` for what holds none.

    ``raw`` takes a file's weights where it has their moving average too.
    """
    path = Path(name)
    is_hub = name.startswith(HUB)
    if (path / MARKER).is_file() or (path / "checkpoints").is_dir():
        run = open_run(name)
        chosen = "" if run.checkpoint == path else f"{run.chosen}: {run.checkpoint.name}"
        names = {"label_names": run.metadata["data"]["class_names"]}
        return OpenedWeights(run.load_weights(), run.config["MODEL"], names, chosen)
    try:
        if is_hub:
            return _open_hub(name)
        return _open_file(name, path / MODEL if path.is_dir() else path, raw)
    except UserError:
        raise
    # safetensors', torch's, timm's, the Hub's and the network's errors have no type in common
    except Exception as error:
        reason = first_line(error)[:200]
        # torch's message advises to run the code in the file
        if isinstance(error, pickle.UnpicklingError):
            reason = (
                "not by torch.save, or more than tensors, which is not read since it may run code"
            )
        remedy = "name a run, a checkpoint, a file of weights or a timm model"
        if is_hub:
            remedy = (
                f"check network and HF_TOKEN, or download {MODEL} elsewhere from "
                f"https://huggingface.co/{name.removeprefix(HUB)} and pass --init FILE"
            )
        raise UserError(
            f"{name}: holds no weights that can be read ({reason}): {remedy}"
        ) from error


def _open_hub(name: str) -> OpenedWeights:
    """Download the weights of a model of the Hub, and timm's description of them."""
    from timm.models import load_model_config_from_hf, load_state_dict_from_hf

    hub_id = name.removeprefix(HUB)
    preprocessing, architecture, arguments = load_model_config_from_hf(hub_id)
    # An older timm's default, `weights_only=False`, would run code in the file.
    weights = load_state_dict_from_hf(hub_id, weights_only=True)
    return OpenedWeights(
        weights, describe_model(architecture, arguments, preprocessing), preprocessing
    )


def _open_file(name: str, file: Path, raw: bool) -> OpenedWeights:
    """Read a file of weights of ours, of timm's or of another program."""
    saved = load_file(file) if file.suffix == ".safetensors" else read_torch_file(file)
    weights, notes = unwrap_weights(saved, f"{name}: {file.name}", raw)
    hf_config = _read_description(file)
    if "config" in hf_config:  # the description is a run's
        names = {"label_names": hf_config.get("data", {}).get("class_names")}
        return OpenedWeights(weights, hf_config["config"]["MODEL"], names)
    if "architecture" not in hf_config:
        return OpenedWeights(weights, *describe_arguments(saved), "; ".join(notes))
    # older files have timm's pretrained_cfg at the top
    preprocessing = {**hf_config, **hf_config.get("pretrained_cfg", {})}
    model = hf_config.get("model_args", {})
    # export.py writes "none" for a model that timm does not have. Its arguments are MODEL's.
    if hf_config["architecture"] != "none":
        model = describe_model(hf_config["architecture"], model, preprocessing)
    return OpenedWeights(weights, model, preprocessing)


def _read_description(file: Path) -> Values:
    """Return what config.json beside a model's ``file`` says of it, else the file's own header."""
    beside = file.with_name(CONFIG)
    if file.name in (MODEL, RAW, EMA) and beside.is_file():
        return json.loads(read_bytes(beside))
    if file.suffix != ".safetensors":
        return {}
    with safe_open(file, "pt") as opened:
        return json.loads((opened.metadata() or {}).get("config", "{}"))


def load_pretrained(
    model: nn.Module, source: str, names: Sequence[str] = (), classes: str | None = None
) -> str:
    """Load the weights of ``source`` into an unsharded ``model``; return what was done, in a line.

    ``source`` is a run or checkpoint of ours, a folder with model.safetensors, a .safetensors file,
    one of torch's with nothing that may run code, or ``hf-hub:<id>``. Raises
    `UserError` for anything else, and for weights of another architecture. On the meta device,
    ``model`` is compared only.

    The rows of the head are brought into the order of ``names``, the data set's classes; a head of
    other classes is replaced. ``classes`` is a file with the names of the weights', or in
    `order_classes`'s ``order``.
    """
    weights, known, pretrained_cfg, chosen = open_source(source)
    heads = known.get("heads")
    if known.get("timm") and isinstance(model, VisionTransformer):
        heads = plain_heads(build_on_meta(dict(known)), known["timm"])
    # Without names, the rows of the head stay where they are.
    labels: Sequence[int | None] = ()
    warning = ""
    if names:
        labels, warning = match_head(pretrained_cfg, names, classes)
    notes = [f"starting from the weights of {source}{chosen and f' ({chosen})'}"]
    notes += fit_weights(source, weights, model, heads, labels, warning)
    if not next(model.parameters()).is_meta:
        model.load_state_dict(weights)
    return "; ".join(filter(None, notes))


def open_model(name: str, settings: Sequence[str] = (), *, raw: bool = False) -> SavedRun:
    """Open what `open_run` does, models that `resolve_source` names, files of weights, and exports
    for timm or as safetensors.

    Their images are prepared as timm's validate.py does, those of a file as its train.py, but for
    interpolations that training does not know.
    """
    source = resolve_source(name)
    # Such weights have no run's record: task, data and batch are assumed below.
    path = Path(source)
    has_weights = source.startswith(HUB) or path.is_file() or (path / MODEL).is_file()
    if (path / MARKER).is_file() or not has_weights:
        return open_run(name, settings, raw=raw)
    weights, known, pretrained_cfg, chosen = open_source(source, raw=raw)
    named = parse_settings(settings).get("MODEL.timm")
    # timm's defaults for the model: how it was trained is not known.
    if named and not known:
        pretrained_cfg = resolve_preprocessing(named, {})
        known = describe_model(named, {}, pretrained_cfg)
    if known and pretrained_cfg.keys() <= {"label_names"}:  # a run's: nothing on its images
        raise UserError(f"{name}: is a file of a run's checkpoint: name the checkpoint's folder")
    # An export says all of MODEL, of timm's or of ours.
    if not known.get("timm") and "width" not in known:
        raise UserError(
            f"{name}: does not say of which model it is: name timm's with --set MODEL.timm=NAME"
        )
    classes = pretrained_cfg.get("num_classes")
    # A file may not say it: then the head tells.
    if classes is None:
        head = pretrained_cfg["classifier"]
        head = head if isinstance(head, str) else head[0]
        classes = len(weights.get(f"{head}.weight", ()))
    if not classes:
        raise UserError(f"{name}: it has no classes, so there is nothing to evaluate")
    config, notes = _configure(source, {**known, "num_classes": classes}, pretrained_cfg, settings)
    model = build_model(**config["MODEL"])
    convert_weights(weights, model)
    check_weights(source, weights, model)
    folder = path.parent
    if source.startswith(HUB):
        folder = Path("outputs", folder.name.removeprefix(HUB))
    return SavedRun(
        folder,
        checkpoint=path,
        chosen="; ".join(filter(None, ["pretrained", chosen, *notes])),
        config=config,
        metadata={
            "task": "imagenet_dali",
            "data": name_classes({**pretrained_cfg, "num_classes": classes}),
        },
        foreign=weights,
        divided=pretrained_cfg.get("temperature") or 1.0,
    )


def _configure(
    source: str, model: dict[str, Any], pretrained_cfg: Values, settings: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the config that evaluates MODEL ``model``, and notes on how images are prepared.

    ``pretrained_cfg`` is timm's.
    """
    from timm.data import resolve_data_config

    timms = resolve_data_config(pretrained_cfg=pretrained_cfg, use_test_size=True)
    data = data_of(timms)
    notes = []
    # Without it the default is in force.
    if "interpolation" not in data:
        notes.append(f"images are resized bilinearly here, not {timms['interpolation']}")
    if timms["crop_mode"] == "squash":
        notes.append("the centre is cut out here, timm squashes images")
    trained = model["image_size"]
    # Some models without a fixed size are evaluated at a larger one.
    if pretrained_cfg.get("test_input_size"):
        model["image_size"] = pretrained_cfg["test_input_size"][-1]
    # Keys without a default have to be there; an evaluation reads none of them.
    values = REQUIRED | {"MICRO_BATCH_SIZE": BATCH, "MODEL": model, "DATA": data}
    config = restore_config(values, settings, where=source)
    if config["MODEL"]["image_size"] == model["image_size"] != trained:
        notes.append(
            f"images of {model['image_size']} pixels, timm's test_input_size, not {trained} as "
            "trained"
        )
    return config, notes
