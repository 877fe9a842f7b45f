"""Verify a prepared data set; turn existing TFRecord shards into one."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from tqdm import tqdm

from common.data.image_folder import SPLITS
from common.errors import UserError
from common.files import retry_read, sha256_of
from common.shards.dataset import (
    LABELS,
    MANIFEST,
    RECORD,
    find_faults,
    read_labels,
    read_manifest,
    read_table,
)
from common.shards.tfrecord_format import (
    FOOTER_BYTES,
    HEADER_BYTES,
    BadSampleError,
    Example,
    masked_crc,
    unframe,
)
from common.shards.writer import (
    FinishedShard,
    check_jpeg,
    parallel_map,
    table_row,
    write_dataset,
    write_file,
)
from common.text import counted, list_some, print_some, printable

REFUSED = "refused.txt"


def check(root: Path, workers: int) -> list[str]:
    """Compare every byte of a prepared data set with its manifest; return the shards' faults."""
    manifest = read_manifest(root)
    read_labels(root / LABELS, manifest.num_classes)
    for name in manifest.splits:
        read_table(root, manifest, name)
    entries = [entry for split in manifest.splits.values() for entry in split.shards]
    faults = list(find_faults(root, entries))
    # Hashing takes minutes: what names and sizes show is said at once.
    if faults:
        return faults
    paths = [root / entry.name for entry in entries]
    # Threads suffice: hashing releases the GIL.
    with ThreadPoolExecutor(workers) as pool:
        sums = tqdm(pool.map(sha256_of, paths), total=len(paths), unit="shard", disable=None)
        for path, entry, checksum in zip(paths, entries, sums, strict=True):
            if checksum != entry.sha256:
                faults.append(f"{path}: differs from the manifest")
    return faults


def adopt(root: Path, workers: int, max_refused: float) -> int:
    """Index and describe the shards below `root`, without the bad records; return their number.

    Shards are the files of ``train/`` and ``validation/``, or ``train-*`` and ``validation-*`` in
    `root` itself; validation's may have any of its names in `SPLITS`. Labels may start at 0 or 1.
    Class names are the lines of ``labels.txt``, or else the numbers. Raises `UserError` for a split
    without shards, an ambiguous first label, a shard whose records cannot all be found, and as
    `report_refused` does.
    """
    if (root / MANIFEST).exists():
        raise UserError(
            f"{root / MANIFEST}: exists, the data set is prepared already; use --check to verify it"
        )
    names = {}
    for word, split in SPLITS.items():
        if split != "test":
            names[split] = names.get(split, []) + _find_shards(root, word)
    if not names["train"]:
        raise UserError(
            f"{root}: no such folder, or no shards: they are the files of train/, or files named "
            "train-*"
        )
    # In folders of other names too: all that was meant to be used.
    listed = {path.relative_to(root).as_posix() for path in root.rglob("*") if _is_shard(path)}
    unused = sorted(listed.difference(*names.values()))
    if unused:
        print(printable(f"not used: {counted(len(unused), 'file')}, {list_some(unused)}"))
    class_names = read_labels(root / LABELS) if (root / LABELS).is_file() else None
    shards = _inspect_shards(root, list(itertools.chain(*names.values())), workers, max_refused)
    present = np.unique(np.concatenate([shard.rows["label"] for shard in shards.values()]))
    base = _find_label_base(root, present.tolist(), class_names)
    class_names = class_names or [str(label) for label in range(int(present[-1]) + 1 - base)]
    if present[-1] - base >= len(class_names):
        raise UserError(
            f"{root}: label {present[-1]}, out of range for {len(class_names)} classes from {base}"
        )
    if not names["validation"]:
        raise UserError(
            f"{root}: no validation shards: they are the files of validation/, or files named "
            "validation-*"
        )
    # Only the tables change: the shards stay as they are.
    for shard in shards.values():
        shard.rows["label"] -= base
    splits = {}
    for split, listed in names.items():
        splits[split] = [shards[name] for name in listed]
    write_dataset(root, splits, class_names, base, made={"adopted": True})
    return sum(len(shard.refused) for shard in shards.values())


def _inspect_shards(
    root: Path, names: list[str], workers: int, max_refused: float
) -> dict[str, FinishedShard]:
    """Index shards and return them by name; print what is wrong with their records.

    Raises `UserError` for a shard whose records cannot all be found, and as `report_refused` does.
    """
    shards = {}
    refused = []
    faults = []
    inspected = parallel_map(_inspect_shard, [(root, name) for name in names], workers)
    for shard in tqdm(inspected, total=len(names), unit="shard", disable=None):
        if isinstance(shard, str):
            faults.append(shard)
            continue
        shards[shard.name] = shard
        refused += shard.refused
    if faults:
        print_some(faults)
        raise UserError(f"{root}: of {len(faults)} shards not all records are found: see above")
    total = sum(len(shard.rows) for shard in shards.values()) + len(refused)
    report_refused(root, sorted(refused), total, max_refused)
    return shards


def report_refused(root: Path, refused: list[str], total: int, max_refused: float) -> None:
    """Print the first of the refused images, and list all in ``refused.txt``, if there are any.

    Raises `UserError` if they are more than `max_refused` of `total`, or all.
    """
    # An earlier call's list would otherwise stay when nothing is refused.
    (root / REFUSED).unlink(missing_ok=True)
    if not refused:
        return
    write_file(root / REFUSED, "".join(f"{line}\n" for line in refused).encode())
    print_some(refused)
    if len(refused) > max_refused * total or len(refused) == total:
        raise UserError(
            f"{root / REFUSED}: {counted(len(refused), 'image')} refused, more than "
            f"{100 * min(max_refused, 0.99):g}% of {total}; "
            "fix or remove them, or raise --max-refused, and rerun the command"
        )


def _find_shards(root: Path, word: str) -> list[str]:
    """Return the shards of a split named `word`, by their paths from `root`, sorted."""
    # Shards lie in the folder itself, unless it has a folder of that name.
    paths = root.glob(f"{word}-*")
    for folder in root.glob("*"):
        if folder.name.lower() == word and folder.is_dir():
            paths = folder.iterdir()
            break
    return sorted(path.relative_to(root).as_posix() for path in paths if _is_shard(path))


def _is_shard(path: Path) -> bool:
    # DALI's tfrecord2idx writes an index beside each shard.
    is_other = path.suffix == ".idx" or path.name in (LABELS, REFUSED)
    return path.is_file() and not is_other and not path.name.startswith(".")


def _inspect_shard(task: tuple[Path, str]) -> FinishedShard | str:
    """Index the shard ``root / name``, given as that pair.

    Returns what is wrong where its records cannot all be found.
    """
    root, name = task
    return retry_read(root / name, lambda: _index_shard(root / name, name))


def _index_shard(path: Path, name: str) -> FinishedShard | str:
    """Do `_inspect_shard`."""
    rows = []
    refused = []
    number = -1  # number + 1 is how many records precede a fault
    end = 0
    try:
        for number, (offset, record) in enumerate(scan(path)):
            end = offset + len(record)
            try:
                image, label = parse_example(unframe(record))
                # Strictly: training decodes it without another check.
                height, width, color_space = check_jpeg(image)
                # The table has 32 bits: a larger number would wrap around to another class.
                if not 0 <= label < 2**31:
                    raise BadSampleError(f"label {label} is no class number")
                if color_space not in ("YCbCr", "Gray", "RGB"):
                    raise BadSampleError(
                        f"{color_space} JPEG, which decoders turn into different colours"
                    )
                rows.append(table_row(offset, record, image, label, height, width))
            except BadSampleError as error:
                refused.append(f"{path}: record {number} at byte {offset}: {error}")
        if not end:
            raise BadSampleError("no records")
    except BadSampleError as error:
        return f"{path}: {error}, after {number + 1} records, at byte {end}; copy or write it again"
    return FinishedShard(name, sha256_of(path), np.array(rows, RECORD), refused)


def _find_label_base(root: Path, present: list[int], class_names: list[str] | None) -> int:
    """Return 0 or 1, the label of the first class; `present` are the distinct labels, sorted."""
    low = present[0]
    high = present[-1]
    # If no label is 0, either the first class has no images, or labels count from 1, as those of
    # TensorFlow's ImageNet. Only a label of the last class tells.
    if class_names and low and high != len(class_names):
        names = f"{len(class_names)} names counted from 0 and from 1"
        raise UserError(f"{root}: labels {low} to {high} fit {names}; complete them")
    if not class_names and (low > 1 or len(present) != high - low + 1):
        raise UserError(
            f"{root}: labels run from {low} to {high} with gaps; name every class in "
            f"{root / LABELS}"
        )
    return min(low, 1)


def scan(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield ``(offset, record)`` for each record of a shard, in order, its payload unchecked.

    Raises `BadSampleError` where the next record cannot be found: a wrong length, or the end of the
    file inside one.
    """
    offset = 0
    end = path.stat().st_size
    with path.open("rb") as file:
        while offset < end:
            header = file.read(HEADER_BYTES)
            if len(header) < HEADER_BYTES:
                raise BadSampleError("truncated")
            if masked_crc(header[:8]) != header[8:]:
                if header.startswith(b"\x1f\x8b"):  # gzip's magic number
                    raise BadSampleError("compressed with gzip: gunzip the shard first")
                raise BadSampleError(
                    "checksum of the length does not match; the rest of the shard cannot be read"
                )
            size = HEADER_BYTES + int.from_bytes(header[:8], "little") + FOOTER_BYTES
            if offset + size > end:
                raise BadSampleError("truncated")
            yield offset, header + file.read(size - HEADER_BYTES)
            offset += size


def parse_example(payload: bytes | memoryview) -> tuple[bytes, int]:
    """Return the image and its label as stored.

    Raises `BadSampleError` unless there is exactly one of each, of the right type.
    """
    try:
        features = Example.FromString(payload).features.feature
        # Protobuf gives an empty list for a key that is missing.
        (image,) = features["image/encoded"].bytes_list.value
        (label,) = features["image/class/label"].int64_list.value
    except (DecodeError, ValueError) as error:
        raise BadSampleError(
            "not a tf.train.Example with one image/encoded (bytes) and one image/class/label "
            "(int64)"
        ) from error
    return image, label
