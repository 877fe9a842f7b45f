"""Do everything that needs a GPU, in pieces of under nine minutes, and keep what each shows in a file of its own.

python scripts/gpu_campaign.py                         what has not been done yet with this code on this hardware
python scripts/gpu_campaign.py --only numerics lamb    these pieces
python scripts/gpu_campaign.py --tiny                  everything, so small that it runs on a CPU too
python scripts/gpu_campaign.py --list                  the pieces
python scripts/gpu_campaign.py --table                 what the files say, as Markdown

Each piece runs in a process of its own, so that a crash, or an error that leaves CUDA of no use, costs no other piece.
Exit status 1 if a piece fails or shows something wrong; not if what it needs is not here. CIFAR-10 is trained on images
in --cifar, Caltech-101's tables are made from --caltech; without them the one is not run, and the other is of images
that are made.
"""

import argparse
import importlib
import json
import signal
import sys
from pathlib import Path

from campaign.job import ROOT, Job
from campaign.runner import COMPLETE, FAILED, describe, is_done, read_record, run_piece
from campaign.tables import format_records

from common.errors import UserError, did_you_mean, run_command

RESULTS = Path(__file__).resolve().parent / "campaign" / "results"
WORK = ROOT / "outputs" / "gpu_campaign"
PIECES = {  # by name: the module of scripts/campaign that has it
    "numerics": "numerics",
    "no_sync": "no_sync",
    "memory": "memory",
    "resume": "resume",
    "collectives": "resume",
    "amp_imagenet": "speed",
    "amp_caltech101": "amp_caltech101",
    "vit_s16_eager": "speed",
    "vit_s16_compiled": "speed",
    "vit_b16_eager": "speed",
    "vit_b16_compiled": "speed",
    "attention": "parts",
    "patch_embedding": "parts",
    "side_stream": "side_stream",
    "lamb": "optimizers",
    "dali": "dali",
    "cifar10": "cifar10",
}


def main(argv: list[str]) -> None:
    args = parse(argv)
    if args.list:
        print("\n".join(f"{name:<18} {summary(name)}" for name in args.only))
    elif args.table:
        records = [record for name in args.only if (record := read_record(args.output / f"{name}.json"))]
        print(format_records(records) if records else f"no results in {args.output}")
    else:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its processes too
        try:
            sys.exit(run(args, argv))
        finally:
            signal.signal(signal.SIGTERM, before)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(PIECES), metavar="PIECE", help="these pieces (default: all)")
    parser.add_argument("--tiny", action="store_true", help="so small that it shows only that everything runs")
    parser.add_argument("--again", action="store_true", help="also the pieces that are done")
    parser.add_argument("--output", type=Path, help=f"folder of the results (default: {RESULTS.relative_to(ROOT)})")
    parser.add_argument("--limit", type=float, default=540, metavar="SECONDS", help="of a piece (default: 540)")
    parser.add_argument("--cifar", type=Path, metavar="DIR", help="CIFAR-10's folder")
    parser.add_argument("--caltech", type=Path, metavar="DIR", help="Caltech-101's folder")
    parser.add_argument("--list", action="store_true", help="say what the pieces are")
    parser.add_argument("--table", action="store_true", help="print the results")
    parser.add_argument("--debug", action="store_true", help="show a traceback for mistakes too")
    args = parser.parse_args(argv)
    for name in args.only:
        if name not in PIECES:
            raise UserError(f"--only {name}: no such piece, --list says which there are{did_you_mean(name, PIECES)}")
    args.output = args.output or (WORK / "tiny" if args.tiny else RESULTS)
    return args


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Run what is not done; return the exit status."""
    about, failed = describe(argv), []
    print(f"{json.dumps(about['hardware'])} commit {about['commit']}", flush=True)
    for name in args.only:
        path = args.output / f"{name}.json"
        if is_done(read_record(path), about, args.tiny) and not args.again:
            print(f"{name}: done before", flush=True)
            continue
        print(f"{name} ...", flush=True)
        data = {key: folder.resolve() for key in ("cifar", "caltech") if (folder := getattr(args, key))}
        folder = (args.output if args.tiny else WORK) / "work" / name
        record = run_piece(PIECES[name], name, Job(args.tiny, folder, args.limit, data), path, about)
        failed += [name] * (record["status"] == FAILED)
        why = "" if record["status"] == COMPLETE else f": {record['why']}"
        print(f"{name}: {record['status']} in {record['seconds']:.1f} s{why}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def summary(name: str) -> str:
    """Return what a piece does."""
    try:
        return getattr(importlib.import_module(f"campaign.{PIECES[name]}"), name).__doc__.partition("\n")[0]
    except ModuleNotFoundError as error:
        return f"({error.name} is not installed)"


if __name__ == "__main__":
    run_command(main)
