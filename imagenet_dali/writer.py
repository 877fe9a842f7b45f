"""Write a prepared data set: the shards, then the tables, then the manifest."""

import contextlib
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
from pydantic import FailFast

from common.data.image_folder import Files
from common.errors import printable
from common.files import Count, Schema, read_json
from common.object_store import StorePath, list_files
from imagenet_dali.images import BadImageError, convert_image
from imagenet_dali.manifest import FORMAT, MANIFEST, PARTIAL, records_path
from imagenet_dali.records import RECORD, build_example, frame
from imagenet_dali.sources import read_images
from imagenet_dali.tar_source import Place


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
class Shard:
    """One finished shard: its path from the root, its checksum and its rows (column ``shard`` not filled in yet)."""

    name: str
    sha256: str
    rows: np.ndarray


class Report(Schema):
    """What became of the images of a shard; those that were refused are named by their number."""

    name: str
    sha256: str
    rows: Annotated[list[tuple[Count, Count, Count, Count, Count, Count, Count, Count]], FailFast()]
    refused: Annotated[list[tuple[Count, str]], FailFast()]
    converted: Count


def write_shard(task: ShardTask) -> dict[str, Any]:
    """Write one shard and its report, unless an earlier call has; return the report."""
    report_path = task.dest / PARTIAL / f"{task.name}.json"
    if report_path.is_file() and (task.dest / task.name).is_file():
        return read_json(report_path, Report, most=1 << 30).model_dump()
    quality, short_side = task.options.quality, task.options.short_side
    rows, refused, converted, offset = [], [], 0, 0
    digest = hashlib.sha256()
    with atomic_file(task.dest / task.name) as shard:
        reads = read_images(task.source, task.files, task.places)
        for number, ((filename, label), read) in enumerate(zip(task.files, reads, strict=True)):
            try:
                image = convert_image(read(), quality, short_side)
            except BadImageError as error:
                refused.append((number, printable(error)))
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


def to_shard(report: dict[str, Any]) -> Shard:
    """Return the shard that a report of `write_shard` describes."""
    return Shard(report["name"], report["sha256"], np.array([tuple(row) for row in report["rows"]], RECORD))


def write_dataset(
    root: Path, splits: dict[str, list[Shard]], class_names: list[str], label_base: int, made: dict[str, Any]
) -> None:
    """Write everything but the shards; the manifest, which makes the folder a data set, is written last.

    `label_base` is the first label as stored in the shards; `made` describes how they were made.
    """
    described, tables = build_tables(root, splits)
    labels = "".join(f"{name}\n" for name in class_names).encode()
    manifest = {
        "format": FORMAT,
        "num_classes": len(class_names),
        "label_base": label_base,
        "splits": described,
        "made": made,
    }
    for path, content in (tables | {root / "labels.txt": labels, root / MANIFEST: manifest_text(manifest)}).items():
        with atomic_file(path) as file:
            file.write(content)


def relative_to_root(root: Path, faults: list[str]) -> list[str]:
    """Return lines that name files below `root` with relative paths, as stored in the manifest."""
    return [fault.removeprefix(f"{root}/") for fault in faults]


def manifest_text(manifest: dict[str, Any]) -> bytes:
    """Return the content of a manifest's file."""
    return json.dumps(manifest, indent=1).encode()


def build_tables(root: Path, splits: dict[str, list[Shard]]) -> tuple[dict[str, Any], dict[Path, bytes]]:
    """Return the manifest's entries for the splits, and the content of each table by its path."""
    described, tables = {}, {}
    for split, shards in splits.items():
        rows, files = (
            np.concatenate([shard.rows for shard in shards]),
            list_files(root, [shard.name for shard in shards]),
        )
        rows["shard"] = np.repeat(np.arange(len(shards)), [len(shard.rows) for shard in shards])
        buffer = io.BytesIO()
        np.save(buffer, rows)
        tables[records_path(root, split)] = buffer.getvalue()
        described[split] = {
            "records": len(rows),
            "records_sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
            "shards": [
                {
                    "name": shard.name,
                    "bytes": files[shard.name].size,
                    "records": len(shard.rows),
                    "sha256": shard.sha256,
                }
                for shard in shards
            ],
        }
    return described, tables


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that gets its name only when it is complete and on disk, or uploaded."""
    if isinstance(path, StorePath):
        with tempfile.TemporaryFile() as file:
            yield file  # pyright: ignore[reportReturnType]
            file.seek(0)
            path.upload(file)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(
        f".{path.name}.tmp"
    )  # a fixed name, so that a restart overwrites what a killed process left
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
