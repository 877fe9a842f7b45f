"""Config, data set and plan of a run, with every check that is possible before the launch."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.checkpoint.resume import AUTO, NEVER
from common.checkpoint.weights import fit_pretrained, resolve_source
from common.colossal import MixedPrecision, build_mixed_precision, check_tensor_parallel, name_dtype
from common.config.load import data_root, load_config, named_root
from common.config.plan import DataSummary, Plan, build_plan, shrink_micro_batch
from common.errors import UserError
from common.files import is_url
from common.hardware import memory_bytes
from common.launch.detect import Launch
from common.metrics.loggers import check_trackers
from common.model.build import build_on_meta
from common.planner.limits import NO_MACHINE, check_limits
from common.task import Task


class Prepared(NamedTuple):
    """The resolved config, which nothing changes any more, its plan, and the data set (None for some dry runs)."""

    config: dict[str, Any]
    plan: Plan
    data: DataSummary | None
    precision: MixedPrecision  # of ``fp16`` on this machine


def prepare_run(args: argparse.Namespace, launch: Launch, task: Task) -> Prepared:
    """Resolve the config for ``launch``, count the data set and compute the plan.

    ``--dry-run`` needs neither data, which may be on another machine, nor GPUs. Raises `UserError` for everything that
    would fail later.
    """
    config = load_config(args.config, [*args.set, *([f"INIT={args.init}"] if args.init else [])], task.recipe)
    gpus = launch.world_size
    if args.dry_run and launch.launcher == "single":
        gpus = args.gpus or args.world_size or config["GPUS"]
    data, root = None, named_root(config)
    is_to_fetch = config["DATA"]["download"] and Path(root).is_dir() and not any(Path(root).iterdir())
    if not args.dry_run or (root and (is_url(root) or Path(root).exists()) and not is_to_fetch):
        config["DATA"]["root"] = data_root(config, task.download)
        data = task.describe(config["DATA"])
        config["MODEL"]["num_classes"] = _check_classes(config["MODEL"]["num_classes"], data)
    config = shrink_micro_batch(config, gpus)
    try:
        plan = build_plan(config, gpus, data)
    except UserError as error:
        raise UserError(f"{error}{f' (planned for {gpus} GPUs)' * (gpus != launch.world_size)}") from None
    config |= {"INIT": _resolve_init(config["INIT"])}
    config |= {"TOTAL_BATCH_SIZE": plan.total_batch, "gradient_accumulation": plan.accumulation}
    precision = _check_builds(config, plan, args.dry_run)
    return Prepared(config, replace(plan, dtype=name_dtype(precision.dtype)), data, precision)


def check_init(config: Mapping[str, Any], args: argparse.Namespace) -> str:
    """Raise `UserError` if INIT's weights do not fit, or for FREEZE without INIT; return the message after loading.

    MODEL.heads counts as stated if set on the command line, or in a config file that also sets INIT.
    """
    if not config["INIT"]:
        if config["FREEZE"] and args.resume in (AUTO, NEVER):
            raise UserError(
                f"FREEZE={config['FREEZE']!r} without INIT trains a head on random weights: add --init or omit FREEZE"
            )
        return ""
    keys = {setting.partition("=")[0] for setting in args.set}
    heads_stated = bool(keys & {"MODEL", "MODEL.heads"}) or not (args.init or "INIT" in keys)
    classes = config["MODEL"]["num_classes"]
    _, done = fit_pretrained(build_on_meta(config["MODEL"]), config["INIT"], heads_stated=heads_stated)
    return done if classes else done.partition(";")[0]


def spare_classes(config: Mapping[str, Any], data: DataSummary) -> str:
    """Return a warning where the head has more classes than the data set, unless it may be that of INIT's weights."""
    classes = config["MODEL"]["num_classes"]
    if config["INIT"] or classes == data.num_classes:
        return ""
    return (
        f"warning: MODEL.num_classes={classes} is more than the data set's {data.num_classes} classes; None takes as "
        "many as it has"
    )


def _resolve_init(source: str | None) -> str | None:
    try:
        return source and resolve_source(source)
    except UserError as error:
        raise UserError(f"INIT={error}") from error


def _check_classes(num_classes: int | None, data: DataSummary) -> int:
    """Return the number of classes of the head, by default that of the data set; raise `UserError` for fewer."""
    if num_classes is not None and num_classes < data.num_classes:
        raise UserError(
            f"MODEL.num_classes={num_classes}: the data set has labels 0 to {data.num_classes - 1}; "
            f"--set MODEL.num_classes={data.num_classes} (or None) fits"
        )
    return num_classes or data.num_classes


def _check_builds(config: Mapping[str, Any], plan: Plan, is_dry_run: bool) -> MixedPrecision:
    """Raise `UserError` for what memory, sharding or trackers would refuse; return the mixed precision."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if is_dry_run:  # perhaps for another machine
        check_limits(config, plan, NO_MACHINE, "the largest supported machine")
    elif device == "cuda":
        check_limits(config, plan, torch.cuda.get_device_properties(0).total_memory, "a GPU here")
    else:
        check_limits(config, plan, memory_bytes(), "this machine")
    model = {**config["MODEL"], "num_classes": config["MODEL"]["num_classes"] or 1}
    check_tensor_parallel(config["parallel"], model, plan.micro_batch, plan.gpus)
    check_trackers(config["LOG"]["trackers"])
    return build_mixed_precision(config["fp16"], device)
