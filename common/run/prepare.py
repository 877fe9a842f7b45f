"""Config, data set and plan of a run, with every check that is possible before the launch."""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.checkpoint.content import CONFIG, ConfigFile, read_about, read_config
from common.checkpoint.resume import AUTO, NEVER
from common.checkpoint.weights import load_pretrained, resolve_source
from common.config.class_weights import class_weights
from common.config.load import load_config
from common.config.plan import DataSummary, Plan, build_plan
from common.config.schema import describe_keys, find_key
from common.engine.amp import MixedPrecision, build_mixed_precision, name_dtype
from common.engine.noise_scale import UNMEASURED
from common.engine.tensor_parallel.layout import check_tensor_parallel
from common.errors import UserError, at_least_1, command_parser
from common.hardware import memory_bytes
from common.launch.detect import Launch, add_launch_arguments
from common.launchers import is_first_process
from common.metrics import batch_finder, lr_finder
from common.metrics.loggers import check_trackers
from common.model.build import build_on_meta
from common.model.classes import CLASSES_HELP, ORDER_HELP, ORDERS
from common.model.flops import flops_per_image
from common.planner.cluster import CLUSTER_FLAGS, add_cluster_arguments
from common.planner.prediction import check_limits
from common.task import Task, data_root, named_root, refuse_unused
from common.text import first_line, print_wrapped


def parse_arguments(argv: list[str], description: str | None) -> argparse.Namespace:
    """Return the arguments of ``train*.py``; raise `UserError` for conflicting ones."""
    parser = _build_parser(description)
    args = parser.parse_args(argv)
    if args.help_config is not None:
        print(describe_keys(args.help_config, shutil.get_terminal_size().columns))
        sys.exit(0)
    # Not argparse's `required`, which --help-config would need too.
    if args.config is None:
        raise UserError("--config is missing: a config file, or the name of a recipe in configs/")
    # A misspelt key would allow nothing, and be noticed only once the run is refused.
    for key in args.allow_change:
        find_key(key)
    args.measures = args.find_lr or args.find_batch or args.profile
    if args.measures and args.resume != AUTO:
        raise UserError(
            f"--resume {args.resume}: --find-lr, --find-batch and --profile do not resume; omit "
            "it, or use --init for its weights"
        )
    for name in ("gpus", *CLUSTER_FLAGS):
        if getattr(args, name) != parser.get_default(name) and not args.dry_run:
            raise UserError(f"--{name.replace('_', '-')} has no effect without --dry-run")
    return args


def _build_parser(description: str | None) -> argparse.ArgumentParser:
    parser = command_parser(description)
    parser.add_argument("--config", help="a config file, or the name of a recipe in configs/")
    parser.add_argument(
        "--help-config",
        nargs="?",
        const="",  # all keys
        metavar="KEY",
        help="describe a config key, such as fp16 or MODEL.width, or all keys, then exit",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the config",
    )
    parser.add_argument(
        "--output", help="folder of the run (default: outputs/<name of the config>)"
    )
    parser.add_argument(
        "--resume",
        default=AUTO,
        metavar="never|PATH",
        help="default: resume from the newest checkpoint in the output folder; "
        f"{NEVER}: refuse a folder that contains a run; PATH: resume from that checkpoint, or from "
        "the newest of that run; with --output DIR, as a branch in DIR",
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="resume although this key has changed",
    )
    parser.add_argument(
        "--init",
        metavar="SOURCE",
        help=(
            "start from the weights of a run, a file, a timm model or a Hub model (see "
            "--help-config INIT)"
        ),
    )
    parser.add_argument("--classes", metavar="FILE", help=f"of --init: {CLASSES_HELP}")
    parser.add_argument("--class-order", choices=ORDERS, help=f"of --init: {ORDER_HELP}")
    _add_alternatives(parser)
    parser.add_argument(
        # Of the commands of Colossal-AI's benchmark and AMP example.
        "--from_torch",
        "--use_trainer",
        action="store_true",
        help="accepted for compatibility; no effect",
    )
    add_cluster_arguments(parser)
    add_launch_arguments(parser)
    return parser


def _add_alternatives(parser: argparse.ArgumentParser) -> None:
    """Add what a run does in place of training."""
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved config and the plan, then exit"
    )
    parser.add_argument(
        "--gpus", type=at_least_1, help="with --dry-run: plan for N GPUs and compare parallel modes"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--find-lr",
        type=at_least_1,
        nargs="?",
        const=lr_finder.STEPS,
        metavar="STEPS",
        help="run a learning-rate range test instead of training (default: "
        f"{lr_finder.STEPS} steps)",
    )
    instead.add_argument(
        "--find-batch",
        type=at_least_1,
        nargs="?",
        const=batch_finder.STEPS,
        metavar="STEPS",
        help="measure how large a batch pays instead of training (default: "
        f"{batch_finder.STEPS} steps)",
    )
    instead.add_argument(
        "--profile",
        type=at_least_1,
        metavar="STEPS",
        help="record STEPS steps with torch.profiler instead of training",
    )


class Prepared(NamedTuple):
    """The resolved config, its plan, and the data set, which some dry runs do not read."""

    config: dict[str, Any]
    plan: Plan
    data: DataSummary | None
    precision: MixedPrecision  # what ``fp16`` means on this machine


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
    precision = _check_builds(config, plan, args.dry_run)
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


def output_folder(args: argparse.Namespace, config: Mapping[str, Any]) -> Path:
    """Return the folder of the run."""
    name = args.output or config["OUTPUT"] or Path("outputs") / Path(args.config).stem
    return Path(os.path.expanduser(name)).resolve()  # pathlib's fails for a user without a home


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


def check_init(
    config: Mapping[str, Any], args: argparse.Namespace, data: DataSummary | None
) -> str:
    """Refuse INIT's weights that do not fit, or fine-tuning without; return what loading says."""
    classes = args.classes or args.class_order
    if not config["INIT"]:
        if classes:
            raise UserError("--classes, --class-order: only --init's weights have classes to name")
        # With --resume CHECKPOINT the weights are not random.
        if args.resume in (AUTO, NEVER):
            _check_random_start(config, args.config)
        return ""
    names = data.class_names if data else ()
    # The meta device costs no memory. Only names and shapes are compared.
    done = load_pretrained(build_on_meta(config["MODEL"]), config["INIT"], names, classes)
    # what happens to the head is not known without the number of classes
    return done if config["MODEL"]["num_classes"] else done.partition(";")[0]


def _check_random_start(config: Mapping[str, Any], name: str) -> None:
    """Raise `UserError` for what makes sense with trained weights only."""
    decay = config["OPTIMIZER"].get("layer_decay", 1.0)
    # what is said, and whether the config has it
    fine_tuning = {
        f"FREEZE={config['FREEZE']!r}": config["FREEZE"],
        f"OPTIMIZER.layer_decay={decay}": decay < 1,
        f"--config {name}": re.search("fine[-_]?tun", Path(name).stem),  # as deit3_b16_finetune
    }
    for setting, is_set in fine_tuning.items():
        if is_set:
            raise UserError(
                f"{setting} without INIT starts from random weights: add --init SOURCE, or for a "
                "model of timm's --set MODEL.pretrained=True"
            )


def spare_classes(config: Mapping[str, Any], data: DataSummary) -> str:
    """Return a warning where the head has more classes than the data set.

    It may be that of INIT's weights, which is kept.
    """
    classes = config["MODEL"]["num_classes"]
    if config["INIT"] or classes == data.num_classes:
        return ""
    return (
        f"warning: MODEL.num_classes={classes} is more than the data set's {data.num_classes} "
        "classes; None takes as many as it has"
    )


def _check_builds(config: Mapping[str, Any], plan: Plan, is_dry_run: bool) -> MixedPrecision:
    """Refuse what memory, sharding or trackers would refuse later; return the mixed precision."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # A dry run may be for another machine.
    if not is_dry_run:
        on_gpu = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
        check_limits(config, plan, on_gpu or memory_bytes())
    model = config["MODEL"]
    if model.get("sync_bn") and device == "cpu" and not is_dry_run:
        raise UserError("MODEL.sync_bn=True: torch's SyncBatchNorm needs GPUs; leave it out")
    for resolution in plan.resolutions:
        flops_per_image(model, image_size=resolution.image_size)  # refuses what it does not take
        check_tensor_parallel(config["parallel"], model, resolution.micro_batch)
        if resolution.micro_batch == 1:
            _check_single_image(config, plan, resolution.image_size)
    if config["BEST"] == "auroc" and model["num_classes"] not in (None, 2):
        raise UserError(
            f"BEST='auroc': of two classes only, these are {model['num_classes']}; set it to "
            "mean_recall or macro_f1"
        )
    check_trackers(config["LOG"]["trackers"])
    return build_mixed_precision(config["fp16"], device)


def _check_single_image(config: Mapping[str, Any], plan: Plan, size: int) -> None:
    """Refuse what needs more than one image in a micro-batch."""
    why = "a micro-batch is a single image; raise MICRO_BATCH_SIZE or TOTAL_BATCH_SIZE"
    for key in ("MIXUP", "CUTMIX"):
        if config[key]:
            raise UserError(f"{key}={config[key]}: {why}, or add --set {key}=0")
    model = config["MODEL"]
    # The statistics are those of all GPUs' images.
    if model.get("sync_bn") and plan.data_parallel > 1:
        return
    # Batch norms refuse a single value per channel. Only running the model tells.
    images = torch.empty(1, 3, size, size, device="meta")
    try:
        build_on_meta(model, config["FREEZE"]).train()(images)
    except ValueError as error:
        raise UserError(f"MODEL.timm={model['timm']}: {why} ({first_line(error)})") from error
