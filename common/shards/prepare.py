"""Turn folders, tars or parquet files of images into a TFRecord data set; verify or adopt one.

python scripts/prepare.py SOURCE DEST
python scripts/prepare.py --check DIR
python scripts/prepare.py --adopt DIR
"""

import itertools
import json
import multiprocessing
import random
import shutil
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.data.bad_images import MAX_BAD_SHARE
from common.data.image_folder import SPLITS, Files
from common.errors import UserError, command_parser, run_command
from common.hardware import cores
from common.locks import folder_lock
from common.process import Stopped, ends_cleanly
from common.shards.dataset import MANIFEST, PARTIAL, REMEDY, read_manifest
from common.shards.find_images import VALIDATION_SHARE, list_source
from common.shards.label_table import LabelTable
from common.shards.source import ImageListing, Position, RowPosition
from common.shards.verify import REFUSED, adopt, check, report_refused
from common.shards.writer import (
    QUALITY,
    FinishedShard,
    ShardTask,
    parallel_map,
    write_dataset,
    write_file,
    write_shard,
)
from common.text import counted, print_some, print_wrapped, printable

# Flags that decide what is in the data set.
OPTIONS = ("validation_share", "shards", "short_side", "split", "labels", "columns")
JOB = "job.json"
IMAGES_PER_SHARD = 1250  # 1,024 shards for ImageNet's training images, as is usual
IMAGES_PER_WINDOW = 10 * IMAGES_PER_SHARD  # images of parquet files that are shuffled together


@ends_cleanly
def main(argv: list[str]) -> None:
    """Run the command line; raise `UserError` if the data or the arguments are wrong."""
    args = _build_parser().parse_args(argv)
    _check_arguments(args)
    try:
        if args.check or args.adopt:
            _verify(args)
        else:
            options = {name: getattr(args, name) for name in OPTIONS}
            prepare(Path(args.source), Path(args.dest), args.workers, args.max_refused, **options)
    except OSError as error:  # a full disk, for one, names no file
        path = error.filename or args.dest or args.source
        raise UserError(f"{path}: {error.strerror}; fix that and rerun the command") from error
    except KeyboardInterrupt:
        print("stopped; rerun the command to resume", file=sys.stderr)
        raise


def _build_parser() -> ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(
        "Turn folders, tars or parquet files of images into TFRecord shards, tables and manifest."
    )
    parser.prog = "python scripts/prepare.py"
    add = parser.add_argument
    add(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="SOURCE/[train/]<class>/*, ImageNet, or tars or parquet files in SOURCE; DIR with "
        "--check, --adopt",
    )
    add("dest", nargs="?", metavar="DEST", help="a new folder for the data set")
    add("--check", action="store_true", help="verify every byte of the prepared data set DIR")
    add("--adopt", action="store_true", help="verify and describe existing TFRecord shards in DIR")
    add(
        "--max-refused",
        type=float,
        default=MAX_BAD_SHARE,
        metavar="SHARE",
        help="share of the images that may be left out as bad (default: 0.01)",
    )
    add("--labels", metavar="FILE", help="a CSV or TSV of paths from SOURCE, labels, and splits")
    add(
        "--columns",
        metavar="ROLE=NAME,...",
        help="columns of --labels, as path=file,label=species,split=fold (default: by content)",
    )
    add("--workers", type=int, default=cores(), metavar="N", help="processes (default: cores)")
    add(
        "--validation-share",
        type=float,
        metavar="F",
        help="share of each class held out if SOURCE has no validation split (default: 0.2)",
    )
    add(
        "--split",
        choices=sorted({*SPLITS.values()}),
        help="prepare this split alone; of a folder without any, all",
    )
    add(
        "--shards",
        type=int,
        metavar="N",
        help="training shards (default: one per 1,250 images)",
    )
    add(
        "--short-side",
        type=int,
        metavar="N",
        help="shrink images whose shorter side is longer than N pixels to N (Lanczos, then JPEG): "
        "shards get smaller and decode faster, but detail is lost; smaller images are not enlarged",
    )
    return parser


def _check_arguments(args: Namespace) -> None:
    """Raise `UserError` for flags that do not go together, or are out of range."""
    # DEST, --check and --adopt name the three modes: exactly one of them.
    if args.source is None or args.check + args.adopt + (args.dest is not None) != 1:
        raise UserError("give SOURCE and DEST, or --check DIR, or --adopt DIR; see --help")
    mode = "--check" if args.check else "--adopt"
    for name in OPTIONS:
        value = getattr(args, name)
        if args.dest is None and value is not None:
            raise UserError(
                f"--{name.replace('_', '-')}={value}: has no effect with {mode}, since the shards "
                "stay as they are; leave it out"
            )
    if args.split and args.validation_share is not None:
        raise UserError(
            f"--validation-share={args.validation_share}: --split {args.split} prepares all; leave "
            "it out"
        )
    if args.columns and not args.labels:
        raise UserError(f"--columns={args.columns}: columns of which table? add --labels FILE")
    ranges = dict(
        validation_share=(0, 0.99), workers=(1, 1024), shards=(1, 50_000), short_side=(1, 65_535)
    )
    for name, (least, most) in ranges.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise UserError(f"--{name.replace('_', '-')}={value}: choose {least} to {most}")


def _verify(args: Namespace) -> None:
    """Do ``--check`` or ``--adopt``."""
    root = Path(args.source)
    note = ""
    if args.adopt:
        left_out = adopt(root, args.workers, args.max_refused)
        if left_out:
            note = f" but {counted(left_out, 'bad one')}, left out and listed in {REFUSED}"
    else:
        faults = check(root, args.workers)
        if faults:
            print_some(faults)
            raise UserError(f"{root}: faults found: {len(faults)}; {REMEDY}")
    print(f"{printable(root)}: every record is verified{note}")


def prepare(
    source: Path,
    dest: Path,
    workers: int = 1,
    max_refused: float = MAX_BAD_SHARE,
    *,
    validation_share: float | None = None,
    shards: int | None = None,
    short_side: int | None = None,
    split: str | None = None,
    labels: str | None = None,
    columns: str | None = None,
) -> None:
    """Write the images of `source` as a data set into `dest`, resuming an interrupted call.

    The result depends on the images and the keyword arguments only, not on `workers` or
    interruptions. Every image is decoded once, strictly: those that do not decode are left out and
    listed in ``refused.txt``; more than `max_refused` of them raise `UserError` and leave only that
    list.
    """
    # A rerun would list the shards as files of SOURCE.
    if dest.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{dest}: lies inside SOURCE; choose a folder outside {source}")
    earlier = _read_job(dest)
    # A data set that an earlier version made or began keeps that version's split.
    by_count = bool(earlier and not earlier.get("held_out"))
    table = LabelTable(Path(labels), columns, max_refused) if labels else None
    listed = list_source(source, validation_share, split, by_count=by_count, table=table)
    print_wrapped(listed.summary)
    print_wrapped(f"{split or 'validation'}: {listed.validation}")
    # All that the result depends on: a rerun with another job is refused.
    job = dict(
        source=printable(source.resolve()),
        files=listed.fingerprint,
        validation_share=VALIDATION_SHARE if validation_share is None else validation_share,
        shards=shards,
        seed=0,  # of `plan_shards`, which has no other
        quality=QUALITY,
        short_side=short_side,
        split=split,
        held_out=None if by_count else listed.held_out or None,  # None in an earlier version's job
    )
    plan = plan_shards(listed, shards)
    if _is_complete(dest, job, earlier):
        print(f"{printable(dest)}: complete already")
        return
    shards_by_name = _write_shards(dest, listed, plan, short_side, workers)
    _report_refused(dest, listed, shards_by_name.values(), max_refused)
    splits = {}
    for name in listed.splits:
        # In the plan's order, whichever was finished first.
        splits[name] = [shards_by_name[shard] for shard in plan if shard.startswith(f"{name}/")]
    write_dataset(dest, splits, listed.class_names, 0, job)
    # Only after the manifest: a call that is stopped in between is complete.
    shutil.rmtree(dest / PARTIAL)
    for name, of_split in splits.items():
        images = sum(len(shard.rows) for shard in of_split)
        print(f"{printable(dest)}: {images} {name} images in {counted(len(of_split), 'shard')}")
    converted = sum(shard.converted for shard in shards_by_name.values())
    refused = sum(len(shard.refused) for shard in shards_by_name.values())
    print(
        f"{printable(dest)}: {len(listed.class_names)} classes; {converted} images converted, "
        f"{refused} refused"
    )


def _report_refused(
    dest: Path, source: ImageListing, shards: Collection[FinishedShard], max_refused: float
) -> None:
    """List the refused images; if they are too many, leave that list only and raise `UserError`."""
    refused = sorted(itertools.chain(source.refused, *[shard.refused for shard in shards]))
    images = sum(len(shard.rows) for shard in shards) + len(refused)
    try:
        report_refused(dest, refused, images, max_refused)
    except UserError:
        # The images can then be mended and the command rerun.
        for folder in (PARTIAL, *source.splits):
            shutil.rmtree(dest / folder, ignore_errors=True)  # not every split was begun
        raise


def _write_shards(
    dest: Path,
    source: ImageListing,
    plan: Mapping[str, Files],
    short_side: int | None,
    workers: int,
) -> dict[str, FinishedShard]:
    """Write the shards of a plan, but those that are there already; return all by name."""
    tasks = []
    for name, files in plan.items():
        positions = [source.positions.get(file) for file, _ in files]
        tasks.append(
            ShardTask(source.root, dest, name, files, positions, source.class_names, short_side)
        )
    shards = {}
    with (
        folder_lock(dest / PARTIAL),
        tqdm(total=sum(map(len, plan.values())), unit="image", disable=None) as progress,
    ):
        for shard in parallel_map(write_shard, tasks, workers):
            shards[shard.name] = shard
            progress.update(len(shard.rows) + len(shard.refused))
    return shards


def plan_shards(source: ImageListing, shards: int | None) -> dict[str, Files]:
    """Return the files of each shard by its name, shuffled over the whole split.

    `shards` is the number for training; other splits get as many images per shard.
    """
    train = len(next(iter(source.splits.values())))  # the first split is train, or the only one
    shards = shards or max(1, train // IMAGES_PER_SHARD)
    if shards > train:
        raise UserError(f"--shards={shards}: more than the {train} images; choose fewer")
    plan = {}
    for split, files in source.splits.items():
        # Shards are read in blocks, which have to be random samples of the classes.
        # A string as the seed: Python hashes it the same way in every process and version.
        shuffled = _shuffle(files, source.positions, random.Random(f"0/{split}"))
        # A split of few images still gets a shard.
        number = max(1, round(shards * len(files) / train))
        bounds = [len(files) * i // number for i in range(number + 1)]
        for i in range(number):
            plan[f"{split}/{split}-{i:05d}-of-{number:05d}"] = shuffled[bounds[i] : bounds[i + 1]]
    return plan


def _shuffle(files: Files, positions: Mapping[str, Position], rng: random.Random) -> Files:
    """Return all files in random order; many rows of parquet files in windows of random row groups.

    Each shard reads all row groups that it has rows of, since they are compressed as a whole. So a
    window's shards share its row groups.
    """
    blocks = defaultdict(list)
    # Sorted: the order must not depend on how the folder was listed.
    for file in sorted(files):
        position = positions.get(file[0])
        block = ("", 0)  # one block for all images that are read one by one
        if isinstance(position, RowPosition) and len(files) > IMAGES_PER_WINDOW:
            block = (position.container, position.row_group)
        blocks[block].append(file)
    order = list(blocks)
    rng.shuffle(order)
    shuffled = []
    window = []
    for number, block in enumerate(order, 1):
        window += blocks[block]
        if len(window) >= IMAGES_PER_WINDOW or number == len(order):
            rng.shuffle(window)
            shuffled += window
            window = []
    return shuffled


def _read_job(dest: Path) -> dict[str, Any] | None:
    """Return the job that made `dest`, or that claimed it and was stopped."""
    if (dest / MANIFEST).is_file():
        return read_manifest(dest).made
    job = dest / PARTIAL / JOB
    return json.loads(job.read_bytes()) if job.is_file() else None


def _is_complete(dest: Path, job: dict[str, Any], earlier: dict[str, Any] | None) -> bool:
    """Return whether the job is done; if not, claim `dest` for it.

    Raises `UserError` if another job has claimed it, or `dest` holds other files.
    """
    if earlier is None:
        # A failed attempt leaves its list of refused images.
        if dest.exists() and {path.name for path in dest.iterdir()} - {REFUSED}:
            raise UserError(
                f"{dest}: not empty and not a data set; choose an empty folder for DEST"
            )
        write_file(dest / PARTIAL / JOB, json.dumps(job).encode())
        return False
    # The fingerprint of the files is one of the values.
    changed = [key for key, value in job.items() if earlier.get(key) != value]
    if changed:
        raise UserError(
            f"{dest}: holds a data set made with other {', '.join(changed)}; choose another DEST "
            "or delete it"
        )
    return (dest / MANIFEST).is_file()


def _stop(number: int, _: object) -> None:
    """End as on Ctrl-C; killed, Python would warn of semaphores that nobody has released."""
    for worker in multiprocessing.active_children():
        worker.terminate()
    raise Stopped(number)


def run() -> None:
    """Run the command line of this process; SIGTERM ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _stop)
    run_command(main)
