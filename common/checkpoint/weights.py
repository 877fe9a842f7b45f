"""Weights to start from, and how they are fitted to a model: a run's, a file's, an export's, timm's
and the Hub's.

A model of the Hugging Face Hub is named ``hf-hub:<user>/<name>[@revision]``, or as timm does,
``vit_tiny_patch16_224.augreg_in21k``. A head for other classes is replaced, and the position
embedding of another image size is resampled.
"""

import json
import math
import os
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from common.checkpoint.classes import ORDERS, match_classes, order_classes
from common.checkpoint.content import CONFIG, EMA, MARKER, MODEL, SHOWN
from common.checkpoint.foreign_weights import (
    PRETRAINING,
    describe_arguments,
    fit_pool,
    read_torch_file,
    resolve_preprocessing,
    unwrap_weights,
)
from common.checkpoint.save import check_architecture
from common.checkpoint.saved_run import SavedRun, open_run
from common.config.load import parse_settings, restore_config
from common.config.model_keys import TIMM_DATA, pretrained_config
from common.engine.tensor_parallel.sharding import kept_buffers
from common.errors import UserError
from common.files import read_bytes, read_names
from common.model.build import build_model, timm_arguments
from common.model.vit import VisionTransformer
from common.text import first_line

HUB = "hf-hub:"
OTHERS = (
    ", a file of weights, a folder that export wrote for timm, a model of timm's by name, or "
    "hf-hub:<user>/<name>"
)
BATCH = 64  # images that are evaluated at once, unless ``MICRO_BATCH_SIZE`` is set
# timm.create_model's other arguments load further files and unpickle them.
SHAPE = {"act_layer", "norm_layer", *timm_arguments()}


class OpenedWeights(NamedTuple):
    """Parameters by timm's names, what is known of their MODEL, and timm's pretrained_cfg."""

    weights: dict[str, Tensor]
    model: Mapping[str, Any]
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
    if not is_hub and not path.exists():
        raise UserError(
            f"{name}: no such file or folder: name a run, a checkpoint, a file of weights or a "
            "timm model"
        )
    if not is_hub and ((path / MARKER).is_file() or (path / "checkpoints").is_dir()):
        run = open_run(name)
        chosen = "" if run.checkpoint == path else f"{run.chosen}: {run.checkpoint.name}"
        names = {"label_names": run.about["data"]["class_names"]}
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
    from timm.models import load_model_config_from_hf, load_state_dict_from_hf

    hub_id = name.removeprefix(HUB)
    preprocessing, architecture, arguments = load_model_config_from_hf(hub_id)
    weights = load_state_dict_from_hf(hub_id, weights_only=True)  # not the default of an older timm
    return OpenedWeights(weights, {"timm": architecture, **arguments}, preprocessing)


def _open_file(name: str, file: Path, raw: bool) -> OpenedWeights:
    saved = load_file(file) if file.suffix == ".safetensors" else read_torch_file(file)
    weights, notes = unwrap_weights(saved, f"{name}: {file.name}", raw)
    about = _read_description(file)
    if "config" in about:  # a run's
        names = {"label_names": about.get("data", {}).get("class_names")}
        return OpenedWeights(weights, about["config"]["MODEL"], names)
    if "architecture" not in about:
        return OpenedWeights(weights, *describe_arguments(saved), "; ".join(notes))
    own = {key: about.get(key) for key in ("label_names", "num_classes")}
    timm = about["architecture"]  # "none": of a model that timm does not have, by export.py
    model = about.get("model_args", {}) | ({} if timm == "none" else {"timm": timm})
    return OpenedWeights(weights, model, about.get("pretrained_cfg", about) | own)


def _read_description(file: Path) -> Mapping[str, Any]:
    """Return what describes the weights in ``file``: config.json beside a model's, else the file's
    own header.
    """
    beside = file.with_name(CONFIG)
    if file.name in (MODEL, EMA) and beside.is_file():
        return json.loads(read_bytes(beside))
    if file.suffix != ".safetensors":
        return {}
    with safe_open(file, "pt") as opened:
        return json.loads((opened.metadata() or {}).get("config", "{}"))


def _heads_of_timm(source: str, timm: str, **arguments: Any) -> int:
    """Return the heads of the model ``timm``; refuse one that computes something else than
    `build_model`'s.
    """
    from timm import create_model, is_model
    from timm.models.vision_transformer import VisionTransformer

    if not is_model(timm):
        raise UserError(f"{source}: architecture {timm!r} is no model of timm's")
    with torch.device("meta"):
        if type(create_model(timm)) is not VisionTransformer:
            raise UserError(
                f"{source}: {timm} is no plain Vision Transformer; choose a vit_* or deit3_*"
            )
        shape: dict[str, Any] = {key: arguments[key] for key in arguments.keys() & SHAPE} | {
            "depth": 1
        }
        model = create_model(timm, **shape)  # blocks are alike
    block: Any = model.blocks[0]
    has_gelu = type(block.mlp.act) is nn.GELU and block.mlp.act.approximate == "none"
    has_norm = isinstance(block.norm1, nn.LayerNorm) and block.norm1.eps == 1e-6
    pools = (
        model.global_pool == ("token" if model.has_class_token else "avg")
        and not model.pool_include_prefix
    )
    if not (has_gelu and has_norm and pools):
        raise UserError(
            f"{source}: {timm} has another activation, norm or pooling than a plain Vision "
            "Transformer; choose another"
        )
    return block.attn.num_heads


def infer_model(
    name: str, weights: Mapping[str, Tensor], no_embed_class: bool | None = None
) -> dict[str, Any]:
    """Return what the shapes of ``weights`` tell of MODEL: all of its shape but ``heads`` and
    ``num_classes``.
    """
    try:
        width, _, patch_size, _ = weights["patch_embed.proj.weight"].shape
        _, tokens, _ = weights["pos_embed"].shape
        hidden = len(weights["blocks.0.mlp.fc1.weight"])
        registers = weights["reg_token"].shape[1] if "reg_token" in weights else 0
    except (KeyError, ValueError, IndexError) as error:
        first = [f"{key} {list(tensor.shape)}" for key, tensor in weights.items()][:SHOWN]
        raise UserError(
            f"{name}: no Vision Transformer with timm's parameter names ({first_line(error)}), but "
            f"{', '.join(first)}; choose other weights"
        ) from error
    depth = len({key.split(".")[1] for key in weights if key.startswith("blocks.")})
    ratio = hidden / width
    ratio = ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)
    prefix = ("cls_token" in weights) + registers
    # guessed if None: 9 positions are those of 3 x 3 patches, or of 2 x 2 and 5 other tokens
    no_embed_class = prefix > 0 and (
        math.isqrt(tokens) ** 2 == tokens if no_embed_class is None else no_embed_class
    )
    side = math.isqrt(max(0, tokens - (0 if no_embed_class else prefix)))
    return dict(
        image_size=side * patch_size,
        patch_size=patch_size,
        width=width,
        depth=depth,
        mlp_ratio=ratio,
        pool="cls" if "cls_token" in weights else "avg",
        no_embed_class=no_embed_class,
        reg_tokens=registers,
        # DeiT III's; the weights replace any value
        init_values=1e-6 if "blocks.0.ls1.gamma" in weights else None,
    )


def load_pretrained(model: nn.Module, source: str, *classes: Any) -> str:
    """Give ``model``, which is whole, the weights that `fit_pretrained` returns; return its
    line.
    """
    weights, done = fit_pretrained(model, source, *classes)
    model.load_state_dict(weights)
    return done


def fit_pretrained(
    model: nn.Module, source: str, names: Sequence[str] = (), classes: str | None = None
) -> tuple[dict[str, Tensor], str]:
    """Return the weights of ``source`` as far as they fit ``model``, and what was done to them, in
    a line.

    ``source`` is a run or checkpoint of ours, a folder with model.safetensors, a .safetensors file,
    one of torch's with nothing that may run code, or ``hf-hub:<id>``. Raises
    `UserError` for anything else, and for weights of another architecture.

    The rows of the head are brought into the order of ``names``, the data set's classes; a head of
    other classes is replaced. ``classes`` is a file with the names of the weights', or in
    `order_classes`'s ``order``.
    """
    is_ours = isinstance(model, VisionTransformer)
    try:
        weights, known, about, chosen = open_source(source)
        heads = (
            _heads_of_timm(source, **known) if is_ours and known.get("timm") else known.get("heads")
        )
    except UserError as error:
        raise UserError(f"INIT={error}") from error
    notes = [fit_pool(weights, model, known.get("no_embed_class"))]
    if is_ours:
        _check_shape(source, weights, {**known, "heads": heads}, model)
        if not heads:
            notes.append(f"MODEL.heads={model.heads}, which the weights do not tell")
    labels, warning = _match_head(about, names, classes) if names else ([], "")
    notes += _fit_timm(weights, model, labels, warning)
    if is_ours and "pos_embed" in weights:
        notes.append(_fit_position(weights, model))
    check_architecture(Path(source), weights, model)
    start = f"starting from the weights of {source}{chosen and f' ({chosen})'}"
    return weights, "; ".join(filter(None, [start, *notes]))


def _match_head(
    about: Mapping[str, Any], names: Sequence[str], classes: str | None
) -> tuple[list[int | None], str]:
    """Return the row of the weights' head for each of ``names``, and a warning if it is not known;
    ``about`` and ``classes`` name the rows.
    """
    known, words = _name_classes(about, about.get("num_classes") or 0)
    if classes and classes not in ORDERS:
        known, words, classes = read_names(Path(classes)), [], None
    known, warning = order_classes(known, names, classes, len(names))
    return match_classes([known, words], names), warning


def _fit_timm(
    weights: dict[str, Tensor], model: Any, labels: Sequence[int | None] = (), warning: str = ""
) -> list[str]:
    """Rename and resample ``weights`` as timm does for its model, put the heads of ``model`` in
    place of others, and leave out what only pre-training uses; return what was done.
    """
    unused = [name for name in weights if name.startswith(PRETRAINING)]
    if convert := getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None):
        converted = dict(convert(dict(weights), model))
        weights.clear()
        weights |= converted
    for name in unused:
        weights.pop(name, None)  # timm's conversion leaves out some
    left_out = f"without {len(unused)} parameters of pre-training: {', '.join(unused[:SHOWN])}"
    notes = [left_out] if unused else []
    weights |= {name: buffer for name, buffer in kept_buffers(model).items() if name not in weights}
    own = {
        name: p.detach()
        for name, p in model.named_parameters()
        if name.rpartition(".")[0] in model.head_names
    }
    fits = all(name in weights and weights[name].shape == p.shape for name, p in own.items())
    rows = [*range(len(next(iter(own.values()))))]
    order = [*labels, *sorted({*rows} - {*labels})]
    if fits and order == rows:
        return [*notes, warning]
    if fits and None not in order and sorted(order) == rows:
        weights |= {name: weights[name][order] for name in own}
        return [*notes, "the rows of its head in the order of the data set's classes"]
    name = f"{model.head_names[0]}.weight"
    saved = weights.get(name)
    weights |= own
    instead = f", not its {len(saved)}{' others' if fits else ''}" if saved is not None else ""
    return [*notes, f"a new head of {len(own[name])} classes{instead}"]


def _check_shape(
    source: str, weights: Mapping[str, Tensor], known: Mapping[str, Any], model: Any
) -> None:
    """Refuse weights of another shape than ``model``; name every key of MODEL that has to
    change.
    """
    theirs: dict[str, Any] = {}
    own: dict[str, Any] = {}
    parameters = dict(model.named_parameters())
    # Their shapes tell the sizes of patches and images; those of a convolutional stem do not.
    if {"patch_embed.proj.weight", "pos_embed"} <= parameters.keys():
        theirs = infer_model(source, weights, known.get("no_embed_class"))
        own = infer_model("", parameters, model.embedded_prefix == 0)
        if own["image_size"] % theirs["patch_size"] == 0:
            del theirs["image_size"]  # the position embedding is resampled
    own["heads"] = model.heads
    theirs["heads"] = known["heads"] or own["heads"]
    differing = [key for key in theirs if theirs[key] != own[key]]
    fitting = " ".join(f"--set MODEL.{key}={theirs[key]}" for key in differing)
    if differing:
        raise UserError(
            f"INIT={source}: its model differs from "
            f"{', '.join(f'MODEL.{key}={own[key]}' for key in differing)}: "
            f"{fitting} fits, or start from other weights"
        )


def _fit_position(weights: dict[str, Tensor], model: Any) -> str:
    """Bring the position embedding to the grid of ``model``."""
    saved, own = weights["pos_embed"], model.pos_embed
    prefix = model.embedded_prefix
    old, new = (math.isqrt(max(0, table.shape[1] - prefix)) for table in (saved, own))
    if old**2 + prefix != saved.shape[1]:
        return ""  # another architecture, which is refused with all that differs
    if not own.requires_grad:  # fixed, and computed for any grid
        weights["pos_embed"] = own.detach()
        return "fixed positions in place of its"
    if old == new:
        return ""
    from timm.layers import resample_abs_pos_embed  # timm takes a second to import

    weights["pos_embed"] = resample_abs_pos_embed(saved, [new, new], [old, old], prefix)
    return f"position embedding resampled to {new} x {new} patches from {old} x {old}"


def open_model(name: str, settings: Sequence[str] = (), *, raw: bool = False) -> SavedRun:
    """Open what `open_run` does, models that `resolve_source` names, files of weights, and what
    `export` wrote for timm.

    Their images are prepared as timm's validate.py does, those of a file as its train.py, but for
    interpolations that training does not know.
    """
    source = resolve_source(name)
    path = Path(source)
    is_of_run = (path / MARKER).is_file() or (path.parent / MARKER).is_file()
    has_weights = path.is_file() or (path / MODEL).is_file()
    if not source.startswith(HUB) and (is_of_run or not has_weights):
        return open_run(name, settings, raw=raw)
    weights, known, about, chosen = open_source(source, raw=raw)
    named = dict(parse_settings(settings).get("MODEL", ())).get(("timm",))
    if named and not known:
        known, about = {"timm": named}, resolve_preprocessing(named, {})
    if not known.get("timm"):
        raise UserError(
            f"{name}: does not say of which model it is: name timm's with --set MODEL.timm=NAME"
        )
    classes = about.get("num_classes")
    if classes is None:  # of a file, whose head tells
        heads = about["classifier"]
        head = heads if isinstance(heads, str) else heads[0]
        classes = len(weights.get(f"{head}.weight", ()))
    if not classes:
        raise UserError(f"{name}: it has no classes, so there is nothing to evaluate")
    trained = known.get("img_size") or about["input_size"][-1]
    # Larger than in training for some models without a fixed size: timm's validate.py takes it.
    _, _, size = about.get("test_input_size") or (3, trained, trained)
    sizes = {"image_size": size, "num_classes": classes}
    data = {key: about[theirs] for key, theirs in TIMM_DATA.items() if about.get(theirs)}
    if size != trained:
        data["eval_crop"] = about.get("test_crop_pct") or data["eval_crop"]
    given = {
        key: value
        for key, value in known.items()
        if key not in ("img_size", "in_chans", "num_classes")
    }
    values = {
        "TOTAL_BATCH_SIZE": BATCH,
        "NUM_EPOCHS": 1,
        "LEARNING_RATE": 1,
        "MODEL": given | sizes,
        "DATA": data,
    }
    how = data.get("interpolation", "bilinear")
    is_known = how in ("bilinear", "bicubic")
    data["interpolation"] = how if is_known else "bilinear"
    config = restore_config(values, settings, where=source)
    model = build_model(**config["MODEL"])
    _fit_timm(weights, model)
    check_architecture(path, weights, model)
    names, descriptions = _name_classes(about, classes)
    notes = ["pretrained", chosen]
    if size == config["MODEL"]["image_size"] != trained:
        notes.append(f"images of {size} pixels, timm's test_input_size, not {trained} as trained")
    if not is_known:
        notes.append(f"images are resized bilinearly here, not {how}")
    if about.get("crop_mode") == "squash":
        notes.append("the centre is cut out here, timm squashes images")
    folder = path.parent
    if source.startswith(HUB):
        folder = Path("outputs", folder.name.removeprefix(HUB))
    return SavedRun(
        folder=folder,
        checkpoint=path,
        chosen="; ".join(filter(None, notes)),
        config=config,
        about={
            "task": "imagenet_dali",
            "data": {"class_names": names, "descriptions": descriptions},
            "plan": {"micro_batch": BATCH},
        },
        foreign=weights,
    )


def _name_classes(about: Mapping[str, Any], count: int) -> tuple[list[str], list[str]]:
    """Return the classes' names and what they mean; of ImageNet's those that timm knows."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    if about.get("label_names"):
        return list(about["label_names"]), []
    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None:
        return [], []
    info = ImageNetInfo(subset)
    return info.label_names(), [info.index_to_description(label) for label in range(count)]
