"""Config, data set and plan of a run, with every check that is possible before the launch."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.checkpoint.content import CONFIG, ConfigFile, read_config, read_metadata
from common.checkpoint.weights import resolve_source
from common.config.load import load_config
from common.config.plan import DataSummary, Plan, build_plan
from common.engine.amp import build_mixed_precision, name_dtype
from common.engine.noise_scale import UNMEASURED
from common.errors import UserError
from common.files import Values
from common.launch.detect import Launch
from common.launchers import is_first_process
from common.run.arguments import output_folder
from common.run.checks import CHECKS, MACHINE_CHECKS, Prepared
from common.task import Task, data_root, named_root, refuse_unused
from common.text import print_wrapped


class Images(NamedTuple):
    """Which images a run reads, and what is known of them."""

    keys: dict[str, Any]  # the config's DATA, with the folder and the split of this run
    summary: DataSummary | None


def prepare_run(args: Namespace, launch: Launch, task: Task) -> Prepared:
    """Resolve the config for ``launch``, count the data set and compute the plan.

    ``--dry-run`` needs neither data, which may be on another machine, nor GPUs. Raises `UserError`
    for everything that would fail later.
    """
    config = _read(args, task)
    if args.measures:  # at TOTAL_BATCH_SIZE, for which LEARNING_RATE is
        config["BATCH_SIZES"] = []
    images = _find_images(args, config, task)
    classes = _count_classes(config, images.summary)
    plan = _plan(args, launch, config, images.summary)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = build_mixed_precision(config["fp16"], device)
    source = config["INIT"]
    if source:
        # a path that another folder can read, or the whole name on the Hub
        source = resolve_source(source, bool(config["MODEL"].get("pretrained")))
    # The only change of the config: config.json has what was derived, too.
    config |= {
        "DATA": images.keys,
        "MODEL": config["MODEL"] | {"num_classes": classes},
        "INIT": source,
        "TOTAL_BATCH_SIZE": plan.total_batch,
        "gradient_accumulation": plan.accumulation,
    }
    if config["BATCH_SIZES"] == "noise":
        config["LOG"] = config["LOG"] | {"noise_scale": True}
    plan = replace(plan, dtype=name_dtype(precision.dtype))
    prepared = Prepared(config, plan, images.summary, precision)
    # A dry run may be for another machine.
    for check in CHECKS if args.dry_run else (*MACHINE_CHECKS, *CHECKS):
        check(prepared)
    return prepared


def _read(args: Namespace, task: Task) -> dict[str, Any]:
    """Return the config with the command line's settings."""
    # Flags that stand for a key become settings, so that they go through the same checks.
    settings = list(args.set)
    if args.init:
        settings.append(f"INIT={args.init!r}")
    if args.find_batch:
        settings.append("LOG.noise_scale=True")
    return load_config(args.config, settings, task.recipe)


def _find_images(args: Namespace, config: Values, task: Task) -> Images:
    """Choose the folder and the split, and count what is there."""
    keys = dict(config["DATA"])
    root = named_root(keys)
    if task.download and not root and not args.dry_run:
        # The config says so from here on: config.json and a resumed run name the folder.
        root = "data"
        keys |= {"root": root, "download": True}
        if is_first_process():
            print_wrapped(
                f"DATA.root is not set: ./data, to which {task.download} is downloaded unless it "
                "is there"
            )
    if task.has_splits:
        keys["split"] = choose_split(args, config)
    else:  # it holds nothing out
        refuse_unused(keys, ["split"])
    # a dry run reads the data if it is there, but downloads nothing
    is_there = root and Path(root).exists() and not keys["download"]
    if args.dry_run and not is_there:
        return Images(keys, None)
    keys["root"] = data_root(keys, task.download)
    return Images(keys, task.describe(keys))


def choose_split(args: Namespace, config: Values) -> str | None:
    """Return DATA.split, else that of the run which is resumed."""
    split = config["DATA"]["split"]
    # The run's own record goes first. A branch has none at its first start.
    for folder in (output_folder(args, config), Path(args.resume)):
        if split is None and (folder / CONFIG).is_file():
            split = read_config(folder, read_metadata(folder, ConfigFile))["DATA"]["split"]
    return split


def _count_classes(config: Values, data: DataSummary | None) -> int | None:
    """Return the classes of the head: MODEL.num_classes, else the data set's."""
    stated = config["MODEL"]["num_classes"]
    # There may be more classes than the data set's: the head of INIT's weights is kept.
    if data and stated and stated < data.num_classes:
        raise UserError(
            f"MODEL.num_classes={stated}: the data set has labels 0 to {data.num_classes - 1}; "
            f"--set MODEL.num_classes={data.num_classes} (or None) fits"
        )
    return stated or (data and data.num_classes)


def _plan(args: Namespace, launch: Launch, config: Values, data: DataSummary | None) -> Plan:
    """Return the plan for the processes of ``launch``, or the GPUs that a dry run is for."""
    world_size = launch.world_size
    # a plan may be for more GPUs than there are processes
    if args.dry_run and (args.gpus or launch.launcher == "single"):
        world_size = args.gpus or args.world_size or config["GPUS"]
    plan = build_plan(config, world_size, data)
    # The noise is measured between gradients of several micro-batches or ranks.
    if args.find_batch and plan.total_batch == plan.micro_batch:
        raise UserError(f"--find-batch: {UNMEASURED}")
    return plan
