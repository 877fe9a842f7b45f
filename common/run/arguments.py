"""The command line of the training scripts."""

import argparse
import shutil

from common.checkpoint.resume import AUTO, NEVER
from common.config.schema import describe_keys, find_key
from common.errors import UserError, command_parser
from common.launch.detect import add_launch_arguments
from common.metrics.measurements import STEPS
from common.planner.prediction import FLAGS, add_cluster_arguments


def parse_arguments(argv: list[str], description: str | None) -> argparse.Namespace:
    """Return the arguments of ``train*.py``; raise `UserError` for conflicting ones."""
    parser = command_parser(description)
    parser.add_argument("--config", required=True, help="a config file, or the name of a recipe in configs/")
    parser.add_argument(
        "--help-config",
        nargs="?",
        const="",
        metavar="KEY",
        action=_HelpConfig,
        help="describe a config key, such as fp16 or MODEL.width, or all keys, then exit",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the config")
    parser.add_argument("--output", help="folder of the run (default: outputs/<name of the config>)")
    parser.add_argument(
        "--resume",
        default=AUTO,
        metavar="never|PATH",
        help="default: resume from the newest checkpoint in the output folder; "
        f"{NEVER}: refuse a folder that contains a run; PATH: resume from that checkpoint, or from the newest of that "
        "run; with --output DIR, as a branch in DIR",
    )
    parser.add_argument(
        "--allow-change", action="append", default=[], metavar="KEY", help="resume although this key has changed"
    )
    parser.add_argument(
        "--init",
        metavar="SOURCE",
        help="start from the weights of a run, a file, a timm model or a Hub model (see --help-config INIT)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, then exit")
    parser.add_argument("--gpus", type=int, help="with --dry-run: plan for this many GPUs and compare parallel modes")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--find-lr",
        type=_positive,
        nargs="?",
        const=STEPS,
        metavar="STEPS",
        help=f"run a learning-rate range test instead of training (default: {STEPS} steps)",
    )
    instead.add_argument(
        "--profile", type=_positive, metavar="STEPS", help="record STEPS steps with torch.profiler instead of training"
    )
    parser.add_argument(
        "--from_torch", "--use_trainer", action="store_true", help="accepted for compatibility; no effect"
    )
    add_cluster_arguments(parser)
    add_launch_arguments(parser)
    args = parser.parse_args(argv)
    for name in ("config", "output", "resume", "init"):
        if getattr(args, name) == "":
            raise UserError(f'--{name} "" is empty: set a value or omit the flag')
    for key in args.allow_change:
        find_key(key)
    if (args.find_lr or args.profile) and args.resume != AUTO:
        raise UserError(
            f"--resume {args.resume}: --find-lr and --profile do not resume; omit it, or use --init for its weights"
        )
    if args.gpus is not None and (not args.dry_run or args.gpus < 1):
        raise UserError(f"--gpus {args.gpus}: requires --dry-run and a number >= 1; a run counts its processes itself")
    for name in FLAGS:
        if args.gpus is None and getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}: requires --dry-run --gpus N")
    return args


class _HelpConfig(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, _: argparse.Namespace, name: object, option: str | None = None
    ) -> None:
        print(describe_keys(str(name), shutil.get_terminal_size().columns))
        parser.exit()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"invalid number of steps {text!r}: expected an integer >= 1")
    return int(text)
