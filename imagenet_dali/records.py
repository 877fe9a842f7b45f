"""The TFRecord format: records with checksums, and the `tf.train.Example` of one labelled JPEG.

A record is ``u64 length | u32 masked CRC-32C of the length | payload | u32 masked CRC-32C of the payload``, all
little-endian (tensorflow/core/lib/io/record_writer.h). DALI verifies no checksum, so every reader here verifies both.
"""

import importlib.util
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from crc32c import crc32c
from google.protobuf.message import DecodeError

RECORD = np.dtype(
    [
        ("shard", "<u4"),  # number of the shard within its split
        ("offset", "<u8"),  # first byte of the framed record in the shard, and its size
        ("size", "<u4"),
        ("image_start", "<u4"),  # first byte of the JPEG, from `offset`
        ("image_size", "<u4"),
        ("label", "<i4"),  # counted from 0; the shard may store another base
        ("height", "<u4"),
        ("width", "<u4"),
    ]
)
HEADER_BYTES, FOOTER_BYTES = 12, 4
_MASK_DELTA = 0xA282EAD8


class BadRecordError(ValueError):
    """A record that must not reach training; the message is the reason, without the location."""


def _load_example_pb2() -> ModuleType:
    # the package's own __init__ imports torch: seconds and 200 MB that preparation workers do not need
    package: Any = importlib.util.find_spec("tfrecord")
    path = Path(package.submodule_search_locations[0]) / "example_pb2.py"
    spec: Any = importlib.util.spec_from_file_location("example_pb2", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Example = _load_example_pb2().Example


def masked_crc(data: bytes | memoryview) -> int:
    """Return the CRC-32C of `data`, rotated and offset as TFRecord stores it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def frame(payload: bytes) -> bytes:
    """Return the record that holds `payload`."""
    length = struct.pack("<Q", len(payload))
    return b"".join(
        (length, struct.pack("<I", masked_crc(length)), payload, struct.pack("<I", masked_crc(payload))),
    )


def unframe(record: bytes | memoryview) -> memoryview:
    """Return the payload of one whole record, without a copy.

    Raises `BadRecordError` when its length or a checksum is wrong.
    """
    record = memoryview(record)
    if len(record) < HEADER_BYTES + FOOTER_BYTES:
        raise BadRecordError("truncated")
    length, length_crc = struct.unpack_from("<QI", record)
    if masked_crc(record[:8]) != length_crc:
        raise BadRecordError("checksum of the length does not match")
    if length != len(record) - HEADER_BYTES - FOOTER_BYTES:
        raise BadRecordError(f"length field says {length} bytes, not {len(record) - HEADER_BYTES - FOOTER_BYTES}")
    payload = record[HEADER_BYTES:-FOOTER_BYTES]
    if masked_crc(payload) != struct.unpack_from("<I", record, HEADER_BYTES + length)[0]:
        raise BadRecordError("checksum of the data does not match")
    return payload


def scan(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield ``(offset, record)`` for each record of a shard, in order; `unframe` checks what the record holds.

    Raises `BadRecordError` where the next record cannot be found: a wrong length, or the end of the file inside one.
    """
    remaining = os.path.getsize(path)
    offset = 0
    with open(path, "rb") as file:
        while header := file.read(HEADER_BYTES):
            if header.startswith(b"\x1f\x8b"):
                raise BadRecordError("compressed with gzip: gunzip the shard first")
            if len(header) < HEADER_BYTES:
                raise BadRecordError("truncated")
            if masked_crc(header[:8]) != struct.unpack_from("<I", header, 8)[0]:
                raise BadRecordError("checksum of the length does not match; the rest of the shard cannot be read")
            size = HEADER_BYTES + struct.unpack_from("<Q", header)[0] + FOOTER_BYTES
            if size > remaining:
                raise BadRecordError("truncated")
            yield offset, header + file.read(size - HEADER_BYTES)
            offset += size
            remaining -= size


def build_example(image: bytes, label: int, text: str, filename: str, height: int, width: int) -> bytes:
    """Return the serialised Example of one JPEG, under the keys that TensorFlow's ImageNet shards use."""
    example = Example()
    feature = example.features.feature
    feature["image/encoded"].bytes_list.value.append(image)
    feature["image/format"].bytes_list.value.append(b"JPEG")
    feature["image/class/label"].int64_list.value.append(label)
    feature["image/class/text"].bytes_list.value.append(text.encode())
    feature["image/filename"].bytes_list.value.append(filename.encode(errors="surrogateescape"))
    feature["image/height"].int64_list.value.append(height)
    feature["image/width"].int64_list.value.append(width)
    return example.SerializeToString(deterministic=True)  # protobuf maps have no order of their own


def parse_example(payload: bytes | memoryview) -> tuple[bytes, int]:
    """Return ``(image, label as stored)``; `BadRecordError` unless there is exactly one of each, of the right type."""
    try:
        features = Example.FromString(payload).features.feature
    except DecodeError as error:
        raise BadRecordError("not a tf.train.Example") from error
    found = []
    for key, kind in (("image/encoded", "bytes_list"), ("image/class/label", "int64_list")):
        values = getattr(features[key], kind).value if key in features else ()
        if len(values) != 1:
            raise BadRecordError(f"{len(values)} values in {key} as {kind}, not one")
        found.append(values[0])
    return found[0], found[1]
