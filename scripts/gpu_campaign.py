"""Run everything that needs a GPU, in pieces of under nine minutes, and record the results.

python scripts/gpu_campaign.py                         all pieces not yet complete with this code on this hardware
python scripts/gpu_campaign.py --only numerics lamb    these pieces
python scripts/gpu_campaign.py --tiny                  all pieces, small enough for a CPU
python scripts/gpu_campaign.py --list                  the pieces
python scripts/gpu_campaign.py --table                 the results as Markdown

Each piece runs in its own process, so that a crash or a broken CUDA context affects no other. Exit status 1 if a piece
fails; a piece that lacks a library, GPU or data is "not run". CIFAR-10 is trained on the images in --cifar; the
Caltech-101 table uses --caltech, or generated images.
"""

import argparse
import hashlib
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError, command_parser, did_you_mean, run_command
from common.metrics.provenance import PACKAGES, describe_run
from common.tools.harness import COMPLETE, FAILED, ROOT, UNFINISHED, NotRunError, Row, run_piece
from common.tools.result_rows import INTERRUPTED, Record, add_line, format_records, read_records

RESULTS = ROOT / "scripts" / "gpu" / "results.jsonl"
WORK = ROOT / "outputs" / "gpu_campaign"
OURS = ("caltech101_amp", "cifar10_benchmark", "common", "configs", "imagenet_dali", "scripts")
# The module of each piece, a function of the same name; the most valuable first. Modules are imported in the piece's
# process, so that a missing library affects only the pieces that need it.
PIECES = {
    "numerics": "gpu.numerics",
    "training_loops": "gpu.speed",
    "amp_imagenet": "gpu.speed",
    "amp_caltech101": "gpu.speed",
    "cifar10": "gpu.cifar10",
    "small_model": "gpu.speed",
    "throughput": "gpu.speed",
    "no_sync": "gpu.no_sync",
    "memory": "gpu.memory",
    "resume": "gpu.resume",
    "collectives": "gpu.resume",
    "lamb": "gpu.parts",
    "attention": "gpu.parts",
    "patch_embedding": "gpu.parts",
    "rand_augment": "gpu.parts",
    "cuda_prefetch": "gpu.data",
    "dali_beside_training": "gpu.dali",
    "dali": "gpu.dali",
    "jpeg_engine": "gpu.dali",
}


def main(argv: list[str]) -> None:
    args = parse(argv)
    if args.list:
        print("\n".join(f"{name:<21} {title_of(name)}" for name in args.only))
    elif args.table:
        latest = {record.piece: record for record in read_records(args.output) if record.rows}
        records = [latest[name] for name in args.only if name in latest]
        titles = {record.piece: title_of(record.piece) for record in records}
        print(format_records(records, titles) if records else f"no results in {args.output}")
    else:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its processes too
        try:
            sys.exit(run(args, describe(argv, args.tiny)))
        finally:
            signal.signal(signal.SIGTERM, before)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=list(PIECES), metavar="PIECE", help="pieces to run (default: all)")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, to check that everything runs")
    parser.add_argument("--again", action="store_true", help="rerun complete pieces too")
    parser.add_argument("--output", type=Path, help=f"results file (default: {RESULTS.relative_to(ROOT)})")
    parser.add_argument(
        "--limit", type=float, default=540, metavar="SECONDS", help="time limit of a piece (default: 540)"
    )
    parser.add_argument("--cifar", type=Path, metavar="DIR", help="CIFAR-10's folder")
    parser.add_argument("--caltech", type=Path, metavar="DIR", help="Caltech-101's folder")
    parser.add_argument("--list", action="store_true", help="print the pieces and exit")
    parser.add_argument("--table", action="store_true", help="print the results and exit")
    args = parser.parse_args(argv)
    for name in args.only:
        if name not in PIECES:
            raise UserError(f"--only {name}: no such piece, --list prints them{did_you_mean(name, PIECES)}")
    args.output = args.output or (WORK / "tiny" / "results.jsonl" if args.tiny else RESULTS)
    return args


def load_piece(name: str) -> Callable[..., Iterator[Row]]:
    return getattr(importlib.import_module(PIECES[name]), name)


def title_of(name: str) -> str:
    try:
        return (load_piece(name).__doc__ or "").partition("\n")[0]
    except ModuleNotFoundError as error:
        return f"(needs {error.name})"


def run_loaded(name: str, **job: Any) -> Iterator[Row]:
    """Run a piece, in its own process."""
    if not importlib.util.find_spec("colossalai"):
        raise NotRunError("needs colossalai")
    from gpu.job import Job

    yield from load_piece(name)(Job(**job))


def describe(argv: list[str], tiny: bool) -> dict[str, Any]:
    """Return the provenance of this run, with a checksum of the code, which may be uncommitted."""
    about, digest = describe_run(argv, (*PACKAGES, "lightning", "accelerate")), hashlib.sha256()
    for path in sorted(path for folder in OURS for path in (ROOT / folder).rglob("*.py")):
        if not path.name.endswith("_test.py"):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    about |= {"code": digest.hexdigest()[:12], "tiny": tiny}
    about["versions"]["cuda"] = torch.version.cuda
    about["hardware"] |= {"driver": None, "gpus": torch.cuda.device_count()}
    if torch.cuda.is_available():
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        about["hardware"]["driver"] = subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0]
    return about


def run(args: argparse.Namespace, about: dict[str, Any]) -> int:
    """Run the pieces that are not complete; return the exit status."""
    print(f"{json.dumps(about['hardware'])} commit {about['commit']}", flush=True)
    earlier, failed = {record.piece: record for record in read_records(args.output)}, []
    for name in args.only:
        same = name in earlier and is_same(earlier[name], about)
        if same and earlier[name].status == COMPLETE and not args.again:
            print(f"{name}: complete", flush=True)
        elif not args.tiny and not torch.cuda.is_available():
            print(f"{name}: not run: needs a GPU", flush=True)
        else:
            resumes = same and earlier[name].status in (UNFINISHED, INTERRUPTED)
            failed += [name] * (run_one(name, args, about, resumes) == FAILED)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def is_same(record: Record, about: dict[str, Any]) -> bool:
    """Return whether a record has this code, these versions and this hardware."""
    then, now = (
        [one["code"], one["versions"], one["tiny"], one["hardware"] | {"host": None}] for one in (record.run, about)
    )
    return then == now


def run_one(name: str, args: argparse.Namespace, about: dict[str, Any], resumes: bool) -> str:
    """Run a piece, add its rows and status to the file, and return the status."""
    print(f"{name} ...", flush=True)
    folder = (args.output.parent if args.tiny else WORK) / "work" / name
    if not resumes:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)

    def save(row: Row) -> None:
        add_line(args.output, name, about, row=row)
        print(f"    {json.dumps(row, default=str)}", flush=True)

    data = {key: path.resolve() for key in ("cifar", "caltech") if (path := getattr(args, key))}
    piece = partial(run_loaded, name, tiny=args.tiny, folder=folder, seconds=args.limit, data=data)
    started = time.monotonic()
    status, why = run_piece(piece, seconds=args.limit, save=save)
    seconds = round(time.monotonic() - started, 3)
    add_line(args.output, name, about, status=status, why=why, seconds=seconds)
    if status != UNFINISHED:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{name}: {status} in {seconds:.1f} s" + (f": {why}" if why else ""), flush=True)
    return status


if __name__ == "__main__":
    run_command(main)
