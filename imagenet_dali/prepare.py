"""Turn folders, tars or parquet files of images into a TFRecord data set for the loaders; verify, repair or adopt one.

python -m imagenet_dali.prepare SOURCE DEST
python -m imagenet_dali.prepare --check [--repair] DIR
python -m imagenet_dali.prepare --adopt [--repair] DIR
"""

import argparse
import multiprocessing
import signal
import sys
from dataclasses import fields
from pathlib import Path

from common.data.decode import MAX_BAD_SHARE, print_some
from common.errors import UserError, printable, run_command
from common.hardware import cores
from common.object_store import as_path, is_url
from imagenet_dali.adopt import adopt
from imagenet_dali.manifest import copy_back
from imagenet_dali.preparation import prepare
from imagenet_dali.repair import repair
from imagenet_dali.verify import check
from imagenet_dali.writer import Options


def main(argv: list[str]) -> None:
    """Run the command line; raise `UserError` if the data or the arguments are wrong."""
    parser = _build_parser()
    args = parser.parse_args(argv)
    _check_arguments(args, parser)
    try:
        if args.check or args.adopt:
            _verify(args)
        else:
            options = Options(**{field.name: getattr(args, field.name) for field in fields(Options)})
            prepare(Path(args.source), as_path(args.dest), options, args.workers, args.max_refused)
    except OSError as error:  # such as a full disk, which names no file
        path = error.filename or args.dest or args.source
        raise UserError(f"{path}: {error.strerror}; fix that and rerun the command") from error
    except KeyboardInterrupt as stopped:
        print("stopped; rerun the command to resume", file=sys.stderr)
        sys.exit(128 + (stopped.args or (signal.SIGINT,))[0])


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m imagenet_dali.prepare",
        description="Turn folders, tars or parquet files of images into TFRecord shards, tables and manifest.",
    )
    add = parser.add_argument
    source = "SOURCE/[train/]<class>/*, ImageNet, or tars or parquet files in SOURCE; DIR with --check, --adopt"
    add("source", nargs="?", metavar="SOURCE", help=source)
    add("dest", nargs="?", metavar="DEST", help="a new folder for the data set, or s3://, gs://, az:// and a prefix")
    add("--check", action="store_true", help="verify every byte of the prepared data set DIR")
    add("--adopt", action="store_true", help="verify and describe existing TFRecord shards in DIR")
    add("--repair", action="store_true", help="with --check, --adopt: exclude bad records, up to --max-refused")
    refused = "of the images, records or bytes may be left out because they are bad, as 0.01 or 1%% (default: 0.01)"
    add("--max-refused", type=fraction, default=MAX_BAD_SHARE, metavar="SHARE", help=refused)
    add("--labels", type=Path, metavar="FILE", help="with --adopt: the class names, one per line")
    add("--workers", type=int, default=cores(), metavar="N", help="processes (default: cores)")
    share = "of each class, if SOURCE has no validation split (default: 0.2)"
    add("--validation-share", type=float, metavar="F", help=share)
    add("--quality", type=int, default=95, metavar="Q", help="of JPEGs that are re-encoded (default: 95)")
    add("--shards", type=int, metavar="N", help="training shards (default: one per 1,250 images)")
    add("--seed", type=int, default=0, metavar="N", help="of the split and the order (default: 0)")
    short_side = (
        "shrink images whose shorter side is longer than N pixels to N (Lanczos, then JPEG at --quality): shards get "
        "smaller and decode faster, but detail is lost; smaller images are not enlarged"
    )
    add("--short-side", type=int, metavar="N", help=short_side)
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def fraction(text: str) -> float:
    """Return the share that ``0.05`` or ``5%`` says."""
    return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


def _check_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if args.source is None or args.check + args.adopt + (args.dest is not None) != 1:
        raise UserError("give SOURCE and DEST, or --check DIR, or --adopt DIR; see --help")
    if args.dest is not None and is_url(args.source):
        raise UserError(f"{args.source}: SOURCE has to be a local folder; only DEST may be a URL")
    if args.repair and args.dest is not None:
        raise UserError("--repair goes with --check DIR or --adopt DIR")
    unused = [field.name for field in fields(Options)] if args.dest is None else []
    unused += ["max_refused"] * (args.dest is None and not args.repair) + ["labels"] * (not args.adopt)
    for name in unused:
        if (value := getattr(args, name)) != parser.get_default(name):
            raise UserError(f"--{name.replace('_', '-')}={value} has no effect here: leave it out, or see --help")
    limits = dict(validation_share=(0, 0.99), quality=(1, 100), workers=(1, 1024), shards=(1, 50_000))
    for name, (low, high) in (limits | dict(short_side=(1, 65_535), max_refused=(0, 1))).items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise UserError(f"--{name.replace('_', '-')}={value}: choose {low} to {high}")


def _verify(args: argparse.Namespace) -> None:
    root = as_path(args.source)
    if args.adopt:
        faults = adopt(root, args.labels, args.workers, args.max_refused if args.repair else None)
    else:
        faults = repair(root, args.workers, args.max_refused) if args.repair else check(root, args.workers)
    print_some(faults)
    if faults and not args.repair:
        remedy = f"{'--adopt' if args.adopt else '--check'} --repair continues without bad records"
        if any(fault.endswith(copy_back(root)) for fault in faults):
            remedy = f"replace what is missing, then {remedy}"
        raise UserError(f"{root}: faults found: {len(faults)}; {remedy}")
    if faults:
        print(f"{printable(root)}: the records above are excluded; manifest.json lists them")
    print(f"{printable(root)}: every {'remaining ' if args.repair else ''}record is verified")


def _stop(number: int, _: object) -> None:
    """End on a signal as on Ctrl-C: killed, Python would warn of semaphores that nobody has released."""
    for worker in multiprocessing.active_children():
        worker.terminate()
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    run_command(main)
