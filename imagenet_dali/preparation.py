"""Turn a folder of images into a prepared data set, resumably; every image is decoded once, strictly."""

import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from tqdm import tqdm

from common.data.decode import MAX_BAD_SHARE, join_some, print_some
from common.data.image_folder import Files
from common.errors import UserError, counted, printable
from common.files import folder_lock, read_json
from common.object_store import remove_tree
from imagenet_dali.images import RESAMPLING
from imagenet_dali.manifest import MANIFEST, PARTIAL, find_faults, list_shards, read_manifest
from imagenet_dali.sources import VALIDATION_SHARE, Source, list_source
from imagenet_dali.tar_source import Place
from imagenet_dali.workers import parallel_map
from imagenet_dali.writer import Options, Shard, ShardTask, atomic_file, to_shard, write_dataset, write_shard

REFUSED = "refused.txt"
IMAGES_PER_SHARD = 1250  # 1,024 shards for ImageNet's training images, as is usual
IMAGES_PER_WINDOW = 10 * IMAGES_PER_SHARD  # of parquet files that are shuffled together


class Job(BaseModel):
    """What a data set is made of and how, while it is made."""

    model_config = ConfigDict(extra="allow")


def prepare(
    source: Path, dest: Path, options: Options | None = None, workers: int = 1, max_refused: float = MAX_BAD_SHARE
) -> None:
    """Write the images of `source` as a data set into `dest`, resuming an interrupted call.

    The result depends on the images and the options only, not on `workers` or interruptions. Images that do not decode
    are left out and listed in ``refused.txt``; more than `max_refused` of them, or a class that loses all its
    training images, raises `UserError` and leaves only that list.
    """
    options, shown = options or Options(), printable(dest)
    if dest.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{dest}: lies inside SOURCE; choose a folder outside {source}")
    listed = list_source(source, options.validation_share, options.seed, workers)
    if listed.others:
        suffixes = sorted({Path(name).suffix.lower() for name in listed.others})
        print(f"{counted(len(listed.others), 'other file')} ignored: {printable(join_some(suffixes))}")
    job = {"source": printable(source.resolve()), "files": listed.fingerprint, **asdict(options)}
    if options.validation_share is None:
        job["validation_share"] = VALIDATION_SHARE
    plan = plan_shards(listed, options.shards, options.seed)
    if _is_complete(dest, job):
        print(f"{shown}: complete already")
        return
    done: dict[str, Shard] = {}
    refused, converted = [], 0
    tasks = (
        ShardTask(
            source, dest, name, files, [listed.places.get(file[0]) for file in files], listed.class_names, options
        )
        for name, files in plan.items()
    )
    total = sum(len(files) for files in plan.values())
    with folder_lock(dest / PARTIAL), tqdm(total=total, unit="image", disable=None) as progress:
        for report in parallel_map(write_shard, tasks, workers):
            name = report["name"]
            done[name] = to_shard(report)  # an eighth of the report's memory
            refused += [(plan[name][number][0], reason) for number, reason in report["refused"]]
            converted += report["converted"]
            progress.update(len(report["rows"]) + len(report["refused"]))
    _report_refused(dest, listed, sorted(refused), max_refused)
    shards = {split: [done[name] for name in plan if name.startswith(f"{split}/")] for split in listed.splits}
    counts = {"refused": len(refused), "converted": converted}
    resampling = {"resampling": RESAMPLING.name.lower()} if options.short_side else {}
    write_dataset(dest, shards, listed.class_names, 0, {**job, **resampling, **counts})
    remove_tree(dest / PARTIAL)
    for split, written in shards.items():
        images, files = sum(len(shard.rows) for shard in written), counted(len(written), "shard")
        print(f"{shown}: {images} {split} images in {files}")
    print(f"{shown}: {len(listed.class_names)} classes; {counts['converted']} images converted, {len(refused)} refused")


def plan_shards(source: Source, shards: int | None, seed: int) -> dict[str, Files]:
    """Return the files of each shard by its name, shuffled over the whole split.

    `shards` is the number for training; other splits get as many images per shard.
    """
    train = len(source.splits["train"])
    shards = shards or max(1, train // IMAGES_PER_SHARD)
    if shards > train:
        raise UserError(f"--shards={shards}: more than the {train} training images; choose fewer")
    plan = {}
    for split, files in source.splits.items():
        shuffled = _shuffle(files, source.places, random.Random(f"{seed}/{split}"))
        number = max(1, round(shards * len(files) / train))
        bounds = [len(files) * i // number for i in range(number + 1)]
        for i in range(number):
            plan[f"{split}/{split}-{i:05d}-of-{number:05d}"] = shuffled[bounds[i] : bounds[i + 1]]
    return plan


def _shuffle(files: Files, places: Mapping[str, Place], rng: random.Random) -> Files:
    """Return all files in random order; those of parquet files in windows of whole, random row groups.

    Of a row group, which is compressed as a whole, every shard of its window reads some rows.
    """
    blocks: dict[tuple[str, int], Files] = {}
    for file in sorted(files):
        place = places.get(file[0])
        block = place[:2] if place and place.is_row and len(files) > IMAGES_PER_WINDOW else ("", 0)
        blocks.setdefault(block, []).append(file)
    order = list(blocks)
    rng.shuffle(order)
    shuffled, window = [], []
    for number, block in enumerate(order, 1):
        window += blocks[block]
        if len(window) >= IMAGES_PER_WINDOW or number == len(order):
            rng.shuffle(window)
            shuffled += window
            window = []
    return shuffled


def _is_complete(dest: Path, job: dict[str, Any]) -> bool:
    """Return whether the job is done; if not, claim `dest` for it. Raise `UserError` if another job has claimed it."""
    job_path = dest / PARTIAL / "job.json"
    if (dest / MANIFEST).is_file():
        earlier = read_manifest(dest)["made"]
    elif job_path.is_file():
        earlier = read_json(job_path, Job).model_extra or {}
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
        manifest = read_manifest(dest)
        for split in manifest["splits"]:
            for fault, _ in find_faults(dest, manifest, split, list_shards(dest, manifest, split)):
                raise UserError(fault)
        remove_tree(dest / PARTIAL)  # left by a run that was stopped after its last step
    return is_complete


def _report_refused(dest: Path, source: Source, refused: list[tuple[str, str]], max_refused: float) -> None:
    """List the refused images; if they are too many, remove all else from `dest` and raise `UserError`."""
    if not refused:
        (dest / REFUSED).unlink(missing_ok=True)
        return
    lines = [f"{printable(filename)}\t{printable(reason)}" for filename, reason in refused]
    with atomic_file(dest / REFUSED) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
    names = {filename for filename, _ in refused}
    total = sum(len(files) for files in source.splits.values())
    left = Counter(label for filename, label in source.splits["train"] if filename not in names)
    lost = [source.class_names[label] for _, label in source.splits["train"] if not left[label]]
    print_some(lines)
    if len(refused) > max_refused * total or lost:
        for folder in (PARTIAL, *source.splits):
            remove_tree(dest / folder)
        what = f"all training images of class {lost[0]}" if lost else f"more than {100 * max_refused:g}% of {total}"
        remedy = "fix or remove them, or raise --max-refused, and rerun the command"
        raise UserError(f"{dest / REFUSED}: {counted(len(refused), 'image')} refused, {what}; {remedy}")
