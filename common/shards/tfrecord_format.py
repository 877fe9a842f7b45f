"""TFRecord: the framing of a record, and the tf.train.Example in it.

A record is its length (8 bytes), the length's checksum (4), the payload and its checksum (4). A
checksum is a masked CRC-32C. Source: tensorflow/core/lib/io/record_writer.cc and
tensorflow/core/example/{example,feature}.proto.
"""

import struct
from typing import Any

from crc32c import crc32c
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

HEADER_BYTES = 12
FOOTER_BYTES = 4
MASK_DELTA = 0xA282EAD8  # kMaskDelta of tensorflow/core/lib/hash/crc32c.h

# An Example has Features, a map of names to a Feature, which is one of three lists of values.
EXAMPLE_PROTO = """
name: "example.proto" package: "tf" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: "BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: "FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: "Int64List" oneof_index: 0 } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED
    type: TYPE_MESSAGE type_name: "FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: "Feature" } } }
message_type { name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" } }
"""
# A pool of its own: TensorFlow and tfrecord define the same messages in the default one.
_pool = DescriptorPool()
_pool.AddSerializedFile(text_format.Parse(EXAMPLE_PROTO, FileDescriptorProto()).SerializeToString())
Example: Any = GetMessageClass(_pool.FindMessageTypeByName("tf.Example"))


class BadSampleError(ValueError):
    """A record or an image that must not reach training, with the reason but not the location."""


def masked_crc(data: bytes | memoryview) -> bytes:
    """Return the CRC-32C of ``data``, rotated and offset as TFRecord stores it."""
    crc = crc32c(data)
    # Python's integers do not wrap around: cut to 32 bits.
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF)


def frame(payload: bytes) -> bytes:
    """Return the record that holds ``payload``."""
    return b"".join((_header(len(payload)), payload, masked_crc(payload)))


def _header(size: int) -> bytes:
    """Return the length of a payload and its checksum."""
    length = struct.pack("<Q", size)
    return length + masked_crc(length)


def unframe(record: bytes | memoryview) -> memoryview:
    """Return the payload of one whole record, without a copy.

    Raises `BadSampleError` if a checksum is wrong.
    """
    # Slices of bytes would be copies.
    record = memoryview(record)
    payload = record[HEADER_BYTES:-FOOTER_BYTES]
    if record[:HEADER_BYTES] != _header(len(payload)):
        raise BadSampleError("length or its checksum does not match")
    if record[-FOOTER_BYTES:] != masked_crc(payload):
        raise BadSampleError("checksum of the data does not match")
    return payload


def read_filename(example: bytes | memoryview) -> str:
    """Return the file name in a serialised Example, "" where it has none."""
    feature = Example.FromString(bytes(example)).features.feature["image/filename"]
    return b"".join(feature.bytes_list.value).decode(errors="surrogateescape")


def build_example(
    image: bytes, label: int, text: str, filename: str, height: int, width: int
) -> bytes:
    """Return the serialised Example of one JPEG, with the keys of TensorFlow's ImageNet shards."""
    example = Example()
    numbers = {"class/label": label, "height": height, "width": width}
    strings = {
        "encoded": image,
        "format": b"JPEG",
        "class/text": text.encode(),
        "filename": filename.encode(errors="surrogateescape"),  # names need not be valid UTF-8
    }
    feature = example.features.feature
    for key, value in numbers.items():
        feature[f"image/{key}"].int64_list.value.append(value)
    for key, value in strings.items():
        feature[f"image/{key}"].bytes_list.value.append(value)
    # Protobuf's maps have no order: without this, equal images may give other bytes.
    return example.SerializeToString(deterministic=True)
