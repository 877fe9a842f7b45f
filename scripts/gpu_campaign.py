"""Run everything that needs a GPU, in pieces of under nine minutes, and keep what each shows.

python scripts/gpu_campaign.py                         what has not been done yet with this code on this hardware
python scripts/gpu_campaign.py --only numerics lamb    these pieces
python scripts/gpu_campaign.py --tiny                  everything, so small that it runs on a CPU too
python scripts/gpu_campaign.py --list                  the pieces
python scripts/gpu_campaign.py --table                 the results as Markdown

Each piece runs in a process of its own, so that a crash, or an error that leaves CUDA of no use, costs no other piece.
Exit status 1 if a piece fails or shows something wrong; not if what it needs is not here. CIFAR-10 is trained on images
in --cifar, Caltech-101's tables are made from --caltech; without them the one is not run, and the other is of images
that are made.
"""

import argparse
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu import cifar10, data, memory, no_sync, numerics, parts, resume, speed
from gpu.job import Job

from common.errors import UserError, did_you_mean, run_command
from common.metrics.provenance import describe_run
from common.tools.harness import COMPLETE, FAILED, ROOT, UNFINISHED, Row, run_piece
from common.tools.result_rows import INTERRUPTED, Record, add_line, format_records, read_records

RESULTS = ROOT / "scripts" / "gpu" / "results.jsonl"
WORK = ROOT / "outputs" / "gpu_campaign"
OURS = ("caltech101_amp", "cifar10_benchmark", "common", "configs", "imagenet_dali", "scripts")
PIECES: dict[str, Callable[[Job], Iterator[Row]]] = {
    piece.__name__: piece
    for piece in (
        *(numerics.numerics, no_sync.no_sync, memory.memory, resume.resume, resume.collectives),
        *(speed.amp_imagenet, speed.amp_caltech101, speed.vit_s16_eager, speed.vit_s16_compiled),
        *(speed.vit_b16_eager, speed.vit_b16_compiled, parts.attention, parts.patch_embedding, data.cuda_prefetch),
        *(parts.lamb, data.dali, cifar10.cifar10),
    )
}


def main(argv: list[str]) -> None:
    args = parse(argv)
    titles = {name: PIECES[name].__doc__.partition("\n")[0] for name in args.only}
    if args.list:
        print("\n".join(f"{name:<18} {title}" for name, title in titles.items()))
    elif args.table:
        latest = {record.piece: record for record in read_records(args.output) if record.rows}
        records = [latest[name] for name in args.only if name in latest]
        print(format_records(records, titles) if records else f"no results in {args.output}")
    else:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its processes too
        try:
            sys.exit(run(args, describe(argv, args.tiny)))
        finally:
            signal.signal(signal.SIGTERM, before)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(PIECES), metavar="PIECE", help="these pieces (default: all)")
    parser.add_argument("--tiny", action="store_true", help="so small that it shows only that everything runs")
    parser.add_argument("--again", action="store_true", help="also the pieces that are done")
    parser.add_argument("--output", type=Path, help=f"file of the results (default: {RESULTS.relative_to(ROOT)})")
    parser.add_argument("--limit", type=float, default=540, metavar="SECONDS", help="of a piece (default: 540)")
    parser.add_argument("--cifar", type=Path, metavar="DIR", help="CIFAR-10's folder")
    parser.add_argument("--caltech", type=Path, metavar="DIR", help="Caltech-101's folder")
    parser.add_argument("--list", action="store_true", help="print the pieces")
    parser.add_argument("--table", action="store_true", help="print the results")
    parser.add_argument("--debug", action="store_true", help="show a traceback for mistakes too")
    args = parser.parse_args(argv)
    for name in args.only:
        if name not in PIECES:
            raise UserError(f"--only {name}: no such piece, --list prints them{did_you_mean(name, PIECES)}")
    args.output = args.output or (WORK / "tiny" / "results.jsonl" if args.tiny else RESULTS)
    return args


def describe(argv: list[str], tiny: bool) -> dict[str, Any]:
    """Return the provenance of this run: of the code too, where there is no git, or changes without a commit."""
    about, digest = describe_run(argv), hashlib.sha256()
    for path in sorted(path for folder in OURS for path in (ROOT / folder).rglob("*.py")):
        if not path.name.endswith("_test.py"):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    about |= {"code": digest.hexdigest()[:12], "tiny": tiny}
    about["versions"]["cuda"] = torch.version.cuda
    about["hardware"]["driver"] = None
    if torch.cuda.is_available():
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        about["hardware"]["driver"] = subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0]
    return about


def run(args: argparse.Namespace, about: dict[str, Any]) -> int:
    """Run what is not done; return the exit status."""
    print(f"{json.dumps(about['hardware'])} commit {about['commit']}", flush=True)
    earlier, failed = {record.piece: record for record in read_records(args.output)}, []
    for name in args.only:
        same = name in earlier and is_same(earlier[name], about)
        if same and earlier[name].status == COMPLETE and not args.again:
            print(f"{name}: done before", flush=True)
        elif not args.tiny and not torch.cuda.is_available():
            print(f"{name}: not run: no GPU", flush=True)
        else:
            resumes = same and earlier[name].status in (UNFINISHED, INTERRUPTED)
            failed += [name] * (run_one(name, args, about, resumes) == FAILED)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def is_same(record: Record, about: dict[str, Any]) -> bool:
    """Return whether a record is of this code, with these versions, on this hardware."""
    then, now = (
        [one["code"], one["versions"], one["tiny"], one["hardware"] | {"host": None}] for one in (record.run, about)
    )
    return then == now


def run_one(name: str, args: argparse.Namespace, about: dict[str, Any], resumes: bool) -> str:
    """Run a piece, add its rows and its end to the file, and return its status."""
    print(f"{name} ...", flush=True)
    data = {key: folder.resolve() for key in ("cifar", "caltech") if (folder := getattr(args, key))}
    job = Job(args.tiny, (args.output.parent if args.tiny else WORK) / "work" / name, args.limit, data)
    if not resumes:
        shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True, exist_ok=True)

    def save(row: Row) -> None:
        add_line(args.output, name, about, row=row)
        print(f"    {json.dumps(row, default=str)}", flush=True)

    status, why = run_piece(PIECES[name], job, seconds=args.limit, save=save)
    seconds = round(time.monotonic() - job.started, 3)
    add_line(args.output, name, about, status=status, why=why, seconds=seconds)
    if status != UNFINISHED:
        shutil.rmtree(job.folder, ignore_errors=True)
    print(f"{name}: {status} in {seconds:.1f} s" + (f": {why}" if why else ""), flush=True)
    return status


if __name__ == "__main__":
    run_command(main)
