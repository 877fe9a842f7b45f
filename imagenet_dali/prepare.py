"""Turn a folder of images into the TFRecord data set that the loaders read; verify, repair or adopt one.

python -m imagenet_dali.prepare SOURCE DEST
python -m imagenet_dali.prepare --check [--repair] DIR
python -m imagenet_dali.prepare --adopt [--repair] DIR
"""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from common.data.corrupt_images import print_some
from common.errors import UserError, run_command
from common.hardware import cores
from imagenet_dali.adopt import adopt
from imagenet_dali.preparation import prepare
from imagenet_dali.repair import repair
from imagenet_dali.verify import check
from imagenet_dali.writer import Options


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m imagenet_dali.prepare",
        description="Turn a folder of images into TFRecord shards with index, labels and manifest.",
    )
    parser.add_argument(
        "source",
        nargs="?",
        type=Path,
        metavar="SOURCE",
        help="SOURCE/[train/]<class>/*, or ImageNet; DIR with --check, --adopt",
    )
    parser.add_argument("dest", nargs="?", type=Path, metavar="DEST", help="a new folder for the data set")
    parser.add_argument("--check", action="store_true", help="verify every byte of the prepared data set DIR")
    parser.add_argument(
        "--adopt", action="store_true", help="verify TFRecord shards in DIR, made elsewhere; index them"
    )
    parser.add_argument("--repair", action="store_true", help="with --check, --adopt: exclude bad records, up to 1 %%")
    parser.add_argument("--labels", type=Path, metavar="FILE", help="with --adopt: the class names, one a line")
    parser.add_argument("--workers", type=int, default=cores(), metavar="N", help="processes (default: cores)")
    parser.add_argument(
        "--validation-share", type=float, metavar="F", help="of each class, where SOURCE has no split (default: 0.2)"
    )
    parser.add_argument(
        "--quality", type=int, default=95, metavar="Q", help="of JPEGs that are re-encoded (default: 95)"
    )
    parser.add_argument("--shards", type=int, metavar="N", help="training shards (default: one for each 1,250 images)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the split and the order (default: 0)")
    parser.add_argument(
        "--short-side",
        type=int,
        metavar="N",
        help="shrink images whose shorter side is longer than N pixels to N (Lanczos, then JPEG at --quality): shards "
        "get smaller and decode faster, but detail is lost for good; smaller images are not enlarged",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: list[str]) -> None:
    """Run the command line; raise `UserError` when the data or the arguments are not right."""
    args = build_parser().parse_args(argv)
    _check_arguments(args)
    remedy = "--repair continues without bad records, up to 1 %; or repair the files, or prepare the images again"
    try:
        if args.repair and args.adopt:
            _report_dropped(args.source, adopt(args.source, args.labels, args.workers, leave_out=True))
        elif args.repair:
            _report_dropped(args.source, repair(args.source, args.workers))
        elif args.check:
            _report_faults(args.source, check(args.source, args.workers), f"--check {remedy}")
        elif args.adopt:
            _report_faults(args.source, adopt(args.source, args.labels, args.workers), f"--adopt {remedy}")
        else:
            options = Options(**{field.name: getattr(args, field.name) for field in fields(Options)})
            prepare(args.source, args.dest, options, args.workers)
    except OSError as error:  # a full disk, for one, which names no file
        place = error.filename or args.dest or args.source
        raise UserError(f"{place}: {error.strerror}; fix that and rerun the command") from error
    except KeyboardInterrupt:
        print("stopped; rerun the command to resume", file=sys.stderr)
        sys.exit(130)


def _check_arguments(args: argparse.Namespace) -> None:
    if args.source is None or args.check + args.adopt + (args.dest is not None) != 1:
        raise UserError("give SOURCE and DEST, or --check DIR, or --adopt DIR; see --help")
    if args.repair and args.dest is not None:
        raise UserError("--repair goes with --check DIR or --adopt DIR")
    for name, low, high in (
        ("validation_share", 0, 0.99),
        ("quality", 1, 100),
        ("workers", 1, 1024),
        ("shards", 1, 99_999),
        ("short_side", 1, 65_535),
    ):
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise UserError(f"--{name.replace('_', '-')}={value}: choose {low} to {high}")


def _report_faults(root: Path, faults: list[str], remedy: str) -> None:
    if faults:
        print_some(faults)
        raise UserError(f"{root}: faults found: {len(faults)}; {remedy}")
    print(f"{root}: every record verified")


def _report_dropped(root: Path, dropped: list[str]) -> None:
    print_some(dropped)
    if dropped:
        print(f"{root}: dropped what is above; manifest.json lists it")
    print(f"{root}: every record left is verified")


if __name__ == "__main__":
    run_command(main)
