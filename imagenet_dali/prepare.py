"""Turn a folder of images into the TFRecord data set that the loaders read; verify one, or adopt foreign shards.

python -m imagenet_dali.prepare SOURCE DEST
python -m imagenet_dali.prepare --check DIR
python -m imagenet_dali.prepare --adopt DIR
"""

import argparse
import contextlib
import fcntl
import hashlib
import itertools
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.errors import UserError, run_command
from imagenet_dali.dataset import MANIFEST, PARTIAL
from imagenet_dali.sources import Source, list_source, plan_shards
from imagenet_dali.verify import adopt, check
from imagenet_dali.workers import available_cores, parallel_map
from imagenet_dali.writer import Options, ShardTask, atomic_file, to_shard, write_dataset, write_shard

MAX_REFUSED_SHARE = 0.01
LISTED = 20  # lines printed of a list that may have a million
REFUSED = "refused.txt"


def prepare(source: Path, dest: Path, options: Options | None = None, workers: int = 1) -> None:
    """Write the images of `source` as a data set into `dest`, going on where an interrupted call stopped.

    The result depends on the images and the options alone, not on `workers` nor on interruptions. Images that do not
    decode are left out and listed in ``refused.txt``; more than 1 % of them, or a class that loses all its training
    images, raises `UserError` and leaves nothing but that list.
    """
    options = options or Options()
    if dest.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{dest}: lies inside SOURCE; choose a folder outside {source}")
    listed = list_source(source, options.validation_share, options.seed)
    job = {"source": str(source.resolve()), "files": _fingerprint(listed), **asdict(options)}
    plan = plan_shards(listed, options.shards, options.seed)
    if _is_complete(dest, job):
        print(f"{dest}: complete already")
        return
    reports = {}
    tasks = [ShardTask(source, dest, name, files, listed.class_names, options) for name, files in plan.items()]
    total = sum(len(files) for files in plan.values())
    with _lock(dest), tqdm(total=total, unit="image", disable=None) as progress:
        for report in parallel_map(write_shard, tasks, workers):
            reports[report["name"]] = report
            progress.update(len(report["rows"]) + len(report["refused"]))
    refused = sorted(tuple(entry) for report in reports.values() for entry in report["refused"])
    _report_refused(dest, listed, refused)
    shards = {
        split: [to_shard(reports[name]) for name in plan if name.startswith(f"{split}/")] for split in listed.splits
    }
    counts = {"refused": len(refused), "converted": sum(report["converted"] for report in reports.values())}
    write_dataset(dest, shards, listed.class_names, 0, {**job, **counts})
    shutil.rmtree(dest / PARTIAL)
    for split, written in shards.items():
        print(f"{dest}: {sum(len(shard.rows) for shard in written)} {split} images in {len(written)} shards")
    print(f"{dest}: {len(listed.class_names)} classes; {counts['converted']} images converted, {len(refused)} refused")


def _fingerprint(source: Source) -> str:
    """Return a checksum over the names, labels, sizes and times of the images, without reading them."""
    digest = hashlib.sha256()
    for filename, label in sorted(itertools.chain(*source.splits.values())):
        status = (source.root / filename).stat()
        line = f"{filename}\0{label}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(line.encode(errors="surrogateescape"))
    digest.update("\0".join(source.class_names).encode())
    return digest.hexdigest()


def _is_complete(dest: Path, job: dict[str, Any]) -> bool:
    """Return whether the job is done, or else claim `dest` for it; raise `UserError` when another job did."""
    job_path = dest / PARTIAL / "job.json"
    if (dest / MANIFEST).is_file():
        earlier = json.loads((dest / MANIFEST).read_text())["made"]
    elif job_path.is_file():
        earlier = json.loads(job_path.read_text())
    elif dest.exists() and (not dest.is_dir() or {path.name for path in dest.iterdir()} - {REFUSED, PARTIAL}):
        raise UserError(f"{dest}: not empty and not a data set; choose an empty folder for DEST")
    else:
        with atomic_file(job_path) as file:
            file.write(json.dumps(job).encode())
        return False
    if changed := [key for key, value in job.items() if earlier.get(key) != value]:
        raise UserError(
            f"{dest}: holds a data set made with other {', '.join(changed)}; choose another DEST or delete it"
        )
    if is_complete := (dest / MANIFEST).is_file():
        shutil.rmtree(dest / PARTIAL, ignore_errors=True)  # left by a run that was stopped after its last step
    return is_complete


@contextlib.contextmanager
def _lock(dest: Path) -> Iterator[None]:
    """Hold the job of `dest` against a second process with the same one."""
    with open(dest / PARTIAL / "job.json") as job:
        try:
            fcntl.flock(job, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{dest}: another process is preparing it; wait for it or stop it") from error
        except OSError:  # a file system without locks
            pass
        yield


def _report_refused(dest: Path, source: Source, refused: list[tuple[str, str]]) -> None:
    """List the refused images; when they are too many, remove all else from `dest` and raise `UserError`."""
    if not refused:
        (dest / REFUSED).unlink(missing_ok=True)
        return
    lines = [f"{filename}\t{reason}\n" for filename, reason in refused]
    with atomic_file(dest / REFUSED) as file:
        file.write("".join(lines).encode(errors="surrogateescape"))
    names = {filename for filename, _ in refused}
    total = sum(len(files) for files in source.splits.values())
    left = Counter(label for filename, label in source.splits["train"] if filename not in names)
    lost = [name for label, name in enumerate(source.class_names) if not left[label]]
    _print_some(lines)
    if len(refused) > MAX_REFUSED_SHARE * total or lost:
        for folder in (PARTIAL, *source.splits):
            shutil.rmtree(dest / folder, ignore_errors=True)
        what = f"all training images of class {lost[0]}" if lost else f"more than {MAX_REFUSED_SHARE:.0%} of {total}"
        raise UserError(f"{dest / REFUSED}: {len(refused)} images refused, {what}; mend or remove them and run again")


def _print_some(lines: list[str], most: int = LISTED) -> None:
    print("".join(lines[:most]), end="")
    if len(lines) > most:
        print(f"... and {len(lines) - most} more")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m imagenet_dali.prepare",
        description="Turn a folder of images into TFRecord shards with index, labels and manifest.",
    )
    parser.add_argument("source", nargs="?", type=Path, metavar="SOURCE", help="SOURCE/[train/]<class>/*, or ImageNet")
    parser.add_argument("dest", nargs="?", type=Path, metavar="DEST", help="a new folder for the data set")
    parser.add_argument("--check", type=Path, metavar="DIR", help="verify every byte of a prepared data set")
    parser.add_argument("--adopt", type=Path, metavar="DIR", help="verify TFRecord shards made elsewhere, index them")
    parser.add_argument("--labels", type=Path, metavar="FILE", help="with --adopt: the class names, one a line")
    parser.add_argument(
        "--workers", type=int, default=available_cores(), metavar="N", help="processes (default: cores)"
    )
    parser.add_argument(
        "--validation-share", type=float, metavar="F", help="of each class, where SOURCE has no split (default: 0.2)"
    )
    parser.add_argument(
        "--quality", type=int, default=95, metavar="Q", help="of JPEGs that are encoded anew (default: 95)"
    )
    parser.add_argument("--shards", type=int, metavar="N", help="training shards (default: one for each 1,250 images)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the split and the order (default: 0)")
    parser.add_argument(
        "--short-side", type=int, metavar="N", help="shrink larger images to this many pixels (Lanczos)"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: list[str]) -> None:
    """Run the command line; raise `UserError` when the data or the arguments are not right."""
    args = build_parser().parse_args(argv)
    _check_arguments(args)
    try:
        if args.check:
            _report_faults(args.check, check(args.check, args.workers))
        elif args.adopt:
            _report_faults(args.adopt, adopt(args.adopt, args.labels, args.workers))
        else:
            options = Options(**{field.name: getattr(args, field.name) for field in fields(Options)})
            prepare(args.source, args.dest, options, args.workers)
    except OSError as error:  # a full disk, for one, which names no file
        place = error.filename or args.check or args.adopt or args.dest
        raise UserError(f"{place}: {error.strerror}; mend that and run the same command again") from error
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


def _check_arguments(args: argparse.Namespace) -> None:
    if sum((args.check is not None, args.adopt is not None, args.dest is not None)) != 1:
        raise UserError("give SOURCE and DEST, or --check DIR, or --adopt DIR; see --help")
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


def _report_faults(root: Path, faults: list[str]) -> None:
    if faults:
        _print_some([f"{fault}\n" for fault in faults])
        raise UserError(f"{root}: faults found: {len(faults)}; mend the files, or prepare the images again")
    print(f"{root}: every record verified")


if __name__ == "__main__":
    run_command(main)
