"""The command line of the training scripts."""

import argparse
import shutil

from common.checkpoint.resume import AUTO, NEVER
from common.config.schema import describe_keys
from common.errors import UserError
from common.estimate.cluster import FLAGS, add_cluster_arguments
from common.launch.launcher import add_launch_arguments
from common.metrics.lr_finder import STEPS


def parse_arguments(argv: list[str], description: str | None) -> argparse.Namespace:
    """Return the arguments of ``train*.py``; raise `UserError` for those that do not go together."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a config file, or the name of a recipe in configs/")
    parser.add_argument(
        "--help-config",
        nargs="?",
        const="",
        metavar="KEY",
        action=_HelpConfig,
        help="say what a key of the config means, as fp16 or MODEL.width, or list all keys, then exit",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the config")
    parser.add_argument("--output", help="folder of the run (default: outputs/<name of the config>)")
    parser.add_argument(
        "--resume",
        default=AUTO,
        metavar="never|PATH",
        help=f"default: resume from the newest checkpoint in the output folder; {NEVER}: refuse a folder that holds a "
        "run; PATH: resume from that checkpoint, or the newest of that run; with --output DIR, as a branch in there",
    )
    parser.add_argument(
        "--allow-change", action="append", default=[], metavar="KEY", help="resume although this key has changed"
    )
    parser.add_argument(
        "--init",
        metavar="SOURCE",
        help="start from the weights of a run, a file, or a model of timm's or the Hub: INIT",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, then exit")
    parser.add_argument("--gpus", type=int, help="with --dry-run: plan for this many, and compare the modes")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--find-lr",
        type=_positive,
        nargs="?",
        const=STEPS,
        metavar="STEPS",
        help=f"instead of training, try learning rates in a row and suggest one (default: in {STEPS} steps)",
    )
    instead.add_argument(
        "--profile", type=_positive, metavar="STEPS", help="instead of training, record some steps with torch.profiler"
    )
    parser.add_argument(
        "--from_torch", "--use_trainer", action="store_true", help="as in Colossal-AI's examples; both are always so"
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback for mistakes too")
    add_cluster_arguments(parser)
    add_launch_arguments(parser)
    args = parser.parse_args(argv)
    for name in ("config", "output", "resume", "init"):
        if getattr(args, name) == "":
            raise UserError(f'--{name} "" is empty: name one, or leave the flag out')
    if args.gpus is not None and (not args.dry_run or args.gpus < 1):
        raise UserError(f"--gpus {args.gpus}: goes with --dry-run and is at least 1; a run counts its processes itself")
    for name in FLAGS:
        if args.gpus is None and getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}: goes with --dry-run --gpus N")
    return args


class _HelpConfig(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, _: argparse.Namespace, name: object, option: str | None = None
    ) -> None:
        print(describe_keys(str(name), shutil.get_terminal_size().columns))
        parser.exit()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps: at least 1")
    return int(text)
