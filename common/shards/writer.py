"""Write a prepared data set: the shards, by many processes, then the tables, then the manifest."""

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import simplejpeg
from PIL import Image

from common.data.decoding import (
    FORMATS,
    MAX_BYTES,
    UNREADABLE,
    check_pixels,
    decode_image,
    is_turned,
)
from common.data.image_folder import Files
from common.data.workers import follow_parent
from common.errors import UserError
from common.files import read_bytes, read_range, retry_read
from common.shards.containers import read_rows
from common.shards.dataset import FORMAT, LABELS, MANIFEST, PARTIAL, RECORD
from common.shards.source import Position, RowPosition
from common.shards.tfrecord_format import BadSampleError, build_example, frame
from common.text import first_line, printable

QUALITY = 95  # JPEG quality of images that are encoded again
RESAMPLING = Image.Resampling.LANCZOS
ROWS_IN_MEMORY = 1250  # images of parquet files that a worker holds
_JPEG_MAGIC = b"\xff\xd8\xff"  # start of image, and the first byte of the next marker

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ShardTask:
    """Input of `write_shard`."""

    source: Path
    dest: Path
    name: str
    files: Files
    positions: list[Position | None]  # None for an image that is a file itself
    class_names: list[str]
    short_side: int | None


@dataclass(frozen=True)
class FinishedShard:
    """A shard that was written or inspected."""

    name: str  # path relative to the root
    sha256: str
    rows: np.ndarray  # dtype RECORD, one for each good image; ``shard`` is filled in later
    refused: list[str]  # a line for each image that is left out
    converted: int = 0  # images that were encoded again


def parallel_map(
    function: Callable[[Item], Result], tasks: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Yield the result of each task as it completes, in any order, from `workers` processes.

    With one worker, this process does the work; more are spawned. They end with this process,
    however it ends. Raises `UserError` if one dies.
    """
    if workers == 1:
        yield from map(function, tasks)
        return
    # Spawned: a fork would copy the locks of the progress bar's thread.
    context = multiprocessing.get_context("spawn")
    try:
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    except OSError as error:  # of semaphores
        raise UserError(
            f"--workers={workers}: worker processes need to write to /dev/shm "
            f"({error.strerror}): add --workers 1, or give the container one"
        ) from error
    with pool:
        try:
            # Workers inherit the mask: Ctrl-C while they import would print a traceback.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            # A new list: `as_completed` drops each future, with its result, from it.
            completed = as_completed([pool.submit(function, task) for task in tasks])
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for future in completed:
                yield future.result()
        except BrokenProcessPool as error:
            # Ctrl-C ends workers too: give this process the time to handle it first.
            time.sleep(0.5)
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


def write_shard(task: ShardTask) -> FinishedShard:
    """Write one shard and a report of it, unless an earlier call has."""
    report_path = task.dest / PARTIAL / f"{task.name}.json"
    if report_path.is_file():
        # An interrupted preparation resumes: the report is written after its shard.
        report = json.loads(report_path.read_bytes())
        return _finished(**report)
    rows = []
    refused = []
    converted = 0
    offset = 0
    digest = hashlib.sha256()
    in_memory: dict[RowPosition, bytes] = {}
    with atomic_file(task.dest / task.name) as shard:
        for number, (filename, label) in enumerate(task.files):
            try:
                content = _read(task, number, in_memory)
                image, height, width = convert_image(content, task.short_side)
            except BadSampleError as error:
                refused.append(f"{printable(filename)}\t{printable(error)}")
                continue
            class_name = task.class_names[label]
            record = frame(build_example(image, label, class_name, filename, height, width))
            rows.append(table_row(offset, record, image, label, height, width))
            shard.write(record)
            digest.update(record)
            offset += len(record)
            converted += image is not content  # the same object if it was kept as it is
    report = {
        "name": task.name,
        "sha256": digest.hexdigest(),
        "rows": rows,
        "refused": refused,
        "converted": converted,
    }
    write_file(report_path, json.dumps(report).encode())
    return _finished(**report)


def _finished(rows: Iterable[Sequence[int]], **report: Any) -> FinishedShard:
    """Return a shard by its report, in which rows are tuples or JSON's lists."""
    return FinishedShard(rows=np.array([tuple(row) for row in rows], RECORD), **report)


def table_row(
    offset: int, record: bytes, image: bytes, label: int, height: int, width: int
) -> tuple[int, ...]:
    """Return the row of `RECORD` for a record of a shard; its shard is filled in later."""
    return 0, offset, len(record), record.find(image), len(image), label, height, width


def _read(task: ShardTask, number: int, in_memory: dict[RowPosition, bytes]) -> bytes:
    """Return the content of an image; of parquet files `ROWS_IN_MEMORY` rows are read at once."""
    position = task.positions[number]
    if position is None:
        path = task.source / task.files[number][0]
        try:
            return read_bytes(path, MAX_BYTES)
        except UserError as error:
            raise BadSampleError(str(error).removeprefix(f"{path}: ")) from error
    if isinstance(position, RowPosition):
        if position not in in_memory:
            # A row group is decompressed as a whole: it is read once for many images.
            ahead = task.positions[number : number + ROWS_IN_MEMORY]
            rows = [row for row in ahead if isinstance(row, RowPosition)]
            in_memory |= retry_read(task.source, lambda: read_rows(task.source, rows))
        # Each row is used once: memory holds only those ahead.
        return in_memory.pop(position)
    return read_range(task.source / position.container, position.offset, position.size)


def convert_image(data: bytes, short_side: int | None = None) -> tuple[bytes, int, int]:
    """Decode an image file strictly; return it as an RGB JPEG, and its height and width.

    A YCbCr JPEG that is upright, not too large and of which libjpeg does not warn is returned
    unchanged. All else that `decode_image` reads is re-encoded without chroma subsampling: other
    formats and colour spaces (alpha is dropped, the first frame is taken, 16 bits become 8), images
    with an EXIF rotation, and images whose shorter side is longer than `short_side` (resized by
    Lanczos). Raises `BadSampleError`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of harmless metadata
            return _convert(data, short_side)
    # Too little memory is no fault of the image.
    except (BadSampleError, MemoryError):
        raise
    except Image.UnidentifiedImageError as error:
        raise BadSampleError(
            f"{UNREADABLE}not one of {', '.join(FORMATS)}, or a JPEG of 12 bits"
        ) from error
    # Pillow's decoders raise a dozen unrelated types for damaged files.
    except Exception as error:
        raise BadSampleError(UNREADABLE + first_line(error)) from error


def check_jpeg(data: bytes | memoryview) -> tuple[int, int, str]:
    """Decode a JPEG strictly and return its height, width and colour space.

    libjpeg repairs truncated and damaged data with a warning; here each warning raises
    `BadSampleError`, as do dimensions beyond `MAX_PIXELS`.
    """
    if bytes(data[:3]) != _JPEG_MAGIC:
        raise BadSampleError("not a JPEG")
    try:
        height, width, color_space, _ = simplejpeg.decode_jpeg_header(data)
        check_pixels(height, width)  # pyright: ignore[reportArgumentType]
        # libjpeg converts the four-channel spaces to CMYK only.
        simplejpeg.decode_jpeg(data, "CMYK" if color_space in ("CMYK", "YCCK") else "RGB")
    except ValueError as error:
        raise BadSampleError(f"{UNREADABLE}{error}") from error
    return height, width, color_space  # pyright: ignore[reportReturnType]


def _convert(data: bytes, short_side: int | None) -> tuple[bytes, int, int]:
    """Do `convert_image`, with errors as the decoders raise them."""
    height = width = 0
    color_space = ""
    # `decode_image` decodes other formats, and a JPEG with a warning.
    with contextlib.suppress(BadSampleError):
        height, width, color_space = check_jpeg(data)
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    shorter = min(image.size)  # from the header: nothing is decoded yet
    target = min(short_side or shorter, shorter)
    if target == shorter and color_space == "YCbCr" and not is_turned(image):
        return data, height, width
    pixels = decode_image(data)
    if target < shorter:
        height, width = (round(side * target / shorter) for side in pixels.shape[:2])
        pixels = np.asarray(Image.fromarray(pixels).resize((width, height), RESAMPLING))
    # 444: without chroma subsampling, which would lose colour a second time.
    return simplejpeg.encode_jpeg(pixels, QUALITY, "RGB", "444"), *pixels.shape[:2]


def write_dataset(
    root: Path,
    splits: dict[str, list[FinishedShard]],
    class_names: list[str],
    label_base: int,
    made: dict[str, Any],
) -> None:
    """Write labels, tables and, last, the manifest, which makes the folder a data set.

    `label_base` is the first label as stored in the shards; `made` describes how they were made.
    """
    write_file(root / LABELS, "".join(f"{name}\n" for name in class_names).encode())
    manifest = dict(
        format=FORMAT,
        num_classes=len(class_names),
        label_base=label_base,
        splits={split: _write_table(root, split, shards) for split, shards in splits.items()},
        made=made,
    )
    write_file(root / MANIFEST, json.dumps(manifest, indent=1).encode())


def _write_table(root: Path, split: str, shards: list[FinishedShard]) -> dict[str, Any]:
    """Write the record table of a split; return the split's entry in the manifest."""
    rows = np.concatenate([shard.rows for shard in shards])
    # Numbered here: a worker does not know which shards come before its own.
    rows["shard"] = np.repeat(np.arange(len(shards)), [len(shard.rows) for shard in shards])
    buffer = io.BytesIO()
    np.save(buffer, rows)
    table = buffer.getvalue()
    write_file(root / "records" / f"{split}.npy", table)
    entries = []
    for shard in shards:
        size = (root / shard.name).stat().st_size
        entries.append(
            dict(name=shard.name, bytes=size, records=len(shard.rows), sha256=shard.sha256)
        )
    return dict(records=len(rows), records_sha256=hashlib.sha256(table).hexdigest(), shards=entries)


def write_file(path: Path, content: bytes) -> None:
    """Write a file as `atomic_file` does."""
    with atomic_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that gets its name only when it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A fixed name: a restart overwrites what a killed process left.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            # On disk before it gets its name: a power failure leaves no half file of that name.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
