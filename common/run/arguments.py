"""The command line of a train.py."""

import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.resume import AUTO, NEVER
from common.config.schema import describe_keys, find_key
from common.errors import UserError, at_least_1, command_parser
from common.launch.detect import add_launch_arguments
from common.metrics import batch_finder, lr_finder
from common.model.classes import CLASSES_HELP, ORDER_HELP, ORDERS
from common.planner.cluster import CLUSTER_FLAGS, add_cluster_arguments


def parse_arguments(argv: list[str], description: str | None) -> Namespace:
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
    if args.replay_to and not args.replay:
        raise UserError("--replay-to has no effect without --replay")
    if args.measures and args.resume != AUTO:
        raise UserError(
            f"--resume {args.resume}: --find-lr, --find-batch and --profile do not resume; omit "
            "it, or use --init for its weights"
        )
    for name in ("gpus", *CLUSTER_FLAGS):
        if getattr(args, name) != parser.get_default(name) and not args.dry_run:
            raise UserError(f"--{name.replace('_', '-')} has no effect without --dry-run")
    return args


def _build_parser(description: str | None) -> ArgumentParser:
    parser = command_parser(description)
    add = parser.add_argument
    add("--config", help="a config file, or the name of a recipe in configs/")
    add(
        "--help-config",
        nargs="?",
        const="",  # all keys
        metavar="KEY",
        help="describe a config key, such as fp16 or MODEL.width, or all keys, then exit",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the config",
    )
    add("--output", help="folder of the run (default: outputs/<name of the config>)")
    add(
        "--resume",
        default=AUTO,
        metavar="never|PATH",
        help="default: resume from the newest checkpoint in the output folder; "
        f"{NEVER}: refuse a folder that contains a run; PATH: resume from that checkpoint, or from "
        "the newest of that run; with --output DIR, as a branch in DIR",
    )
    add(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="resume although this key has changed",
    )
    add(
        "--init",
        metavar="SOURCE",
        help=(
            "start from the weights of a run, a file, a timm model or a Hub model (see "
            "--help-config INIT)"
        ),
    )
    add("--classes", metavar="FILE", help=f"of --init: {CLASSES_HELP}")
    add("--class-order", choices=ORDERS, help=f"of --init: {ORDER_HELP}")
    _add_alternatives(parser)
    add(
        # Of the commands of Colossal-AI's benchmark and AMP example.
        "--from_torch",
        "--use_trainer",
        action="store_true",
        help="accepted for compatibility; no effect",
    )
    add_cluster_arguments(parser)
    add_launch_arguments(parser)
    return parser


def _add_alternatives(parser: ArgumentParser) -> None:
    """Add what a run does in place of training."""
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved config and the plan, then exit"
    )
    parser.add_argument(
        "--gpus", type=at_least_1, help="with --dry-run: plan for N GPUs and compare parallel modes"
    )
    instead = parser.add_mutually_exclusive_group()
    finders = {
        "lr": (lr_finder.STEPS, "run a learning-rate range test"),
        "batch": (batch_finder.STEPS, "measure how large a batch pays"),
    }
    for name, (steps, measured) in finders.items():
        instead.add_argument(
            f"--find-{name}",
            type=at_least_1,
            nargs="?",
            const=steps,
            metavar="STEPS",
            help=f"{measured} instead of training (default: {steps} steps)",
        )
    instead.add_argument(
        "--profile",
        type=at_least_1,
        metavar="STEPS",
        help="record STEPS steps with torch.profiler instead of training",
    )
    instead.add_argument(
        "--replay",
        type=at_least_1,
        metavar="STEP",
        help="take that step of the run in the output folder again, from the checkpoint before or "
        "the one of --resume, and say what happened in it; the folder is only read",
    )
    parser.add_argument(
        "--replay-to",
        metavar="DIR",
        help="with --replay: write the step's images and all its figures into DIR",
    )


def output_folder(args: Namespace, config: Mapping[str, Any]) -> Path:
    """Return the folder of the run."""
    name = args.output or config["OUTPUT"] or Path("outputs") / Path(args.config).stem
    return Path(os.path.expanduser(name)).resolve()  # pathlib's fails for a user without a home
