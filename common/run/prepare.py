"""Config, data set and plan of a run, with every check that is possible before the launch."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.checkpoint.content import CONFIG, ConfigFile, read_about, read_config
from common.checkpoint.weights import resolve_source
from common.config.class_weights import class_weights
from common.config.load import load_config
from common.config.plan import DataSummary, build_plan
from common.engine.amp import name_dtype
from common.engine.noise_scale import UNMEASURED
from common.errors import UserError
from common.launch.detect import Launch
from common.launchers import is_first_process
from common.run.arguments import output_folder
from common.run.checks import Prepared, check_builds
from common.task import Task, data_root, named_root, refuse_unused
from common.text import print_wrapped


def prepare_run(args: argparse.Namespace, launch: Launch, task: Task) -> Prepared:
    """Resolve the config for ``launch``, count the data set and compute the plan.

    ``--dry-run`` needs neither data, which may be on another machine, nor GPUs. Raises `UserError`
    for everything that would fail later.
    """
    # Flags that stand for a key become settings, so that they go through the same checks.
    settings = list(args.set)
    if args.init:
        settings.append(f"INIT={args.init!r}")
    if args.find_batch:
        settings.append("LOG.noise_scale=True")
    config = load_config(args.config, settings, task.recipe)
    gpus = launch.world_size
    # a plan may be for more GPUs than there are processes
    if args.dry_run and (args.gpus or launch.launcher == "single"):
        gpus = args.gpus or args.world_size or config["GPUS"]
    if task.download and not named_root(config) and not args.dry_run:
        # The config says so from here on: config.json and a resumed run name the folder.
        config["DATA"] |= {"root": "data", "download": True}
        if is_first_process():
            print_wrapped(
                f"DATA.root is not set: ./data, to which {task.download} is downloaded unless it "
                "is there"
            )
    choose_split(args, config, task)
    data = None
    root = named_root(config)
    # a dry run reads the data if it is there, but downloads nothing
    if not args.dry_run or (root and Path(root).exists() and not config["DATA"]["download"]):
        config["DATA"]["root"] = data_root(config, task.download)
        data = task.describe(config["DATA"])
        # The checks below build the model.
        config["MODEL"]["num_classes"] = _count_classes(config, data)
        class_weights(config, data.class_counts)  # refuses a list of another length
    plan = build_plan(config, gpus, data)
    # The noise is measured between gradients of several micro-batches or ranks.
    if args.find_batch and plan.total_batch == plan.micro_batch:
        raise UserError(f"--find-batch: {UNMEASURED}")
    # a path that another folder can read, or the whole name on the Hub
    config["INIT"] = config["INIT"] and resolve_source(
        config["INIT"], bool(config["MODEL"].get("pretrained"))
    )
    # config.json has what was derived, too
    config |= {"TOTAL_BATCH_SIZE": plan.total_batch, "gradient_accumulation": plan.accumulation}
    precision = check_builds(config, plan, args.dry_run)
    return Prepared(config, replace(plan, dtype=name_dtype(precision.dtype)), data, precision)


def _count_classes(config: Mapping[str, Any], data: DataSummary) -> int:
    """Return the classes of the head: MODEL.num_classes, else the data set's."""
    # There may be more classes than the data set's: the head of INIT's weights is kept.
    classes = config["MODEL"]["num_classes"] or data.num_classes
    if classes < data.num_classes:
        raise UserError(
            f"MODEL.num_classes={classes}: the data set has labels 0 to {data.num_classes - 1}; "
            f"--set MODEL.num_classes={data.num_classes} (or None) fits"
        )
    return classes


def choose_split(args: argparse.Namespace, config: dict[str, Any], task: Task) -> None:
    """Hold out the images that the run which is resumed did, unless DATA.split says how."""
    data = config["DATA"]
    # A task with splits of its own holds nothing out.
    if not task.has_splits:
        refuse_unused(data, ["split"])
        return
    # The run's own record goes first. A branch has none at its first start.
    for folder in (output_folder(args, config), Path(args.resume)):
        if data["split"] is None and (folder / CONFIG).is_file():
            data["split"] = read_config(folder, read_about(folder, ConfigFile))["DATA"]["split"]
