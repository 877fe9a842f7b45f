"""Write a prepared data set: the shards, by many processes, then the tables, then the manifest."""

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from common.data.image_folder import Files
from common.data.workers import follow_parent
from common.errors import UserError, printable
from imagenet_dali.containers import Place
from imagenet_dali.dataset import FORMAT, LABELS, MANIFEST, PARTIAL
from imagenet_dali.find_images import ImageReader
from imagenet_dali.images import BadImageError, convert_image
from imagenet_dali.records import build_example, frame

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Options:
    """Options that affect the content of a data set."""

    validation_share: float | None = None  # of each class, where the source has no split (0.2)
    shards: int | None = None  # for training (one per 1,250 images)
    seed: int = 0  # of the split and the order
    quality: int = 95  # of JPEGs that are re-encoded
    short_side: int | None = None  # larger images are shrunk to this many pixels


@dataclass(frozen=True)
class ShardTask:
    """Input of `write_shard`."""

    source: Path
    dest: Path
    name: str
    files: Files
    places: list[Place | None]  # None for an image that is a file itself
    class_names: list[str]
    options: Options


@dataclass(frozen=True)
class ShardRows:
    """One finished shard: its path from the root, its checksum and its rows (column ``shard`` not filled in yet)."""

    name: str
    sha256: str
    rows: np.ndarray


def parallel_map(function: Callable[[Task], Result], tasks: Iterable[Task], workers: int) -> Iterator[Result]:
    """Yield ``function(task)`` of each task as it completes, in any order, from `workers` spawned processes.

    With one worker, this process does the work. Workers end with this process, however it ends.
    """
    if workers == 1:
        yield from map(function, tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
        try:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited while workers import
            completed = as_completed([pool.submit(function, task) for task in tasks])  # and forgets each
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for future in completed:
                yield future.result()
        except BrokenProcessPool as error:
            raise UserError(
                f"--workers={workers}: a worker process died, perhaps for lack of memory; "
                "rerun the command with fewer workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """End quietly on Ctrl-C, and with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    follow_parent()


def write_shard(task: ShardTask) -> dict[str, Any]:
    """Write one shard and its report, unless an earlier call has; return the report."""
    report_path = task.dest / PARTIAL / f"{task.name}.json"
    if report_path.is_file() and (task.dest / task.name).is_file():
        return json.loads(report_path.read_bytes())
    reader, digest = ImageReader(task.source, task.files, task.places), hashlib.sha256()
    rows, refused, converted, offset = [], [], 0, 0
    with atomic_file(task.dest / task.name) as shard:
        for number, (filename, label) in enumerate(task.files):
            try:
                image = convert_image(reader.read(number), task.options.quality, task.options.short_side)
            except BadImageError as error:
                refused.append((filename, printable(error)))
                continue
            text = task.class_names[label]
            record = frame(build_example(image.data, label, text, filename, image.height, image.width))
            start = record.find(image.data)
            rows.append((0, offset, len(record), start, len(image.data), label, image.height, image.width))
            shard.write(record)
            digest.update(record)
            offset += len(record)
            converted += image.converted
    report = {"name": task.name, "sha256": digest.hexdigest(), "rows": rows, "refused": refused, "converted": converted}
    with atomic_file(report_path) as file:
        file.write(json.dumps(report).encode())
    return report


def write_dataset(
    root: Path, splits: dict[str, list[ShardRows]], class_names: list[str], label_base: int, made: dict[str, Any]
) -> None:
    """Write everything but the shards; the manifest, which makes the folder a data set, is written last.

    `label_base` is the first label as stored in the shards; `made` describes how they were made.
    """
    described = {}
    for split, shards in splits.items():
        rows = np.concatenate([shard.rows for shard in shards])
        rows["shard"] = np.repeat(np.arange(len(shards)), [len(shard.rows) for shard in shards])
        np.save(buffer := io.BytesIO(), rows)
        with atomic_file(root / "records" / f"{split}.npy") as file:
            file.write(buffer.getvalue())
        described[split] = {
            "records": len(rows),
            "records_sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
            "shards": [
                {
                    "name": shard.name,
                    "bytes": (root / shard.name).stat().st_size,
                    "records": len(shard.rows),
                    "sha256": shard.sha256,
                }
                for shard in shards
            ],
        }
    with atomic_file(root / LABELS) as file:
        file.write("".join(f"{name}\n" for name in class_names).encode())
    manifest = dict(format=FORMAT, num_classes=len(class_names), label_base=label_base, splits=described, made=made)
    with atomic_file(root / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=1).encode())


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that gets its name only when it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")  # a restart overwrites what a killed process left
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
