"""Our framing and Examples against the `tfrecord` package; every way in which a shard can be broken."""

import struct

import numpy as np
import pytest
import tfrecord
from crc32c import crc32c

from imagenet_dali.records import (
    RECORD,
    BadRecordError,
    Example,
    build_example,
    frame,
    index_text,
    masked_crc,
    parse_example,
    scan,
    unframe,
)


def shard(path, payloads):
    path.write_bytes(b"".join(frame(payload) for payload in payloads))
    return path


def example(**features):
    message = Example()
    for key, (kind, values) in features.items():
        getattr(message.features.feature[key.replace("__", "/")], kind).value.extend(values)
    return message.SerializeToString()


def test_crc_known_answer():
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert masked_crc(b"123456789") == (((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) % 2**32


def test_frame_equals_the_record_of_another_writer(tmp_path):
    writer = tfrecord.TFRecordWriter(str(tmp_path / "theirs"))
    writer.write({"image/encoded": (b"jpeg", "byte"), "image/class/label": (7, "int")})
    writer.close()
    payload = example(image__encoded=("bytes_list", [b"jpeg"]), image__class__label=("int64_list", [7]))
    [(offset, record)] = scan(tmp_path / "theirs")
    assert (offset, len(record)) == (0, (tmp_path / "theirs").stat().st_size)
    assert Example.FromString(unframe(record)) == Example.FromString(payload)
    assert frame(bytes(unframe(record))) == record
    assert parse_example(unframe(record)) == (b"jpeg", 7)


def test_another_reader_finds_the_standard_keys(tmp_path):
    path = shard(tmp_path / "ours", [build_example(b"jpeg", 3, "tench", "n1/a.jpg", 24, 40)])
    kinds = {"image/encoded": "byte", "image/class/label": "int", "image/height": "int", "image/width": "int"}
    texts = {"image/format": "byte", "image/class/text": "byte", "image/filename": "byte"}
    [read] = tfrecord.tfrecord_loader(str(path), None, kinds | texts)
    assert bytes(read["image/encoded"]) == b"jpeg"
    assert [int(read[key][0]) for key in list(kinds)[1:]] == [3, 24, 40]
    assert [bytes(read[key]) for key in texts] == [b"JPEG", b"tench", b"n1/a.jpg"]


def test_index_equals_that_of_another_indexer(tmp_path):
    path = shard(tmp_path / "ours", [b"a" * 10, b"b" * 300, b""])
    tfrecord.tools.tfrecord2idx.create_index(str(path), str(tmp_path / "theirs.idx"))
    rows = np.array([(0, offset, len(record), 0, 0, 0, 0, 0) for offset, record in scan(path)], RECORD)
    assert index_text(rows) == (tmp_path / "theirs.idx").read_text()


def flip(record, position):
    changed = bytearray(record)
    changed[position] ^= 1
    return bytes(changed)


def test_any_flipped_bit_is_found():
    record = frame(b"payload")
    assert unframe(record) == b"payload"
    for position in range(len(record)):
        with pytest.raises(BadRecordError, match="checksum"):
            unframe(flip(record, position))


def test_unframe_refuses_a_record_of_another_size():
    for record in (frame(b"payload") + b"x", frame(b"payload")[:-1]):
        with pytest.raises(BadRecordError, match="length field says 7 bytes"):
            unframe(record)
    with pytest.raises(BadRecordError, match="truncated"):
        unframe(frame(b"payload")[:15])


def test_scan_stops_where_the_next_record_cannot_be_found(tmp_path):
    whole = frame(b"one") + frame(b"two")
    first = len(frame(b"one"))
    long = struct.pack("<Q", 2**40)
    cases = {
        whole[:-1]: "truncated",
        whole[: first + 5]: "truncated",
        flip(whole, first): "checksum of the length",
        frame(b"one") + long + struct.pack("<I", masked_crc(long)) + b"x" * 100: "truncated",
    }
    for number, (content, reason) in enumerate(cases.items()):
        path = tmp_path / str(number)
        path.write_bytes(content)
        records = scan(path)
        assert next(records) == (0, frame(b"one"))
        with pytest.raises(BadRecordError, match=reason):
            next(records)
    (tmp_path / "zipped").write_bytes(b"\x1f\x8b" + bytes(100))
    with pytest.raises(BadRecordError, match="gunzip"):
        next(scan(tmp_path / "zipped"))
    assert list(scan(shard(tmp_path / "empty", []))) == []


image, label = ("bytes_list", [b"jpeg"]), ("int64_list", [1])


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xff\xff\xff", "not a tf.train.Example"),
        (b"", "image/encoded is missing"),
        (example(image__encoded=image), "image/class/label is missing"),
        (example(image__class__label=label), "image/encoded is missing"),
        (example(image__encoded=("int64_list", [1, 2]), image__class__label=label), "image/encoded is int64_list"),
        (example(image__encoded=("bytes_list", [b"a", b"b"]), image__class__label=label), "encoded has 2 values"),
        (example(image__encoded=image, image__class__label=("float_list", [1.0])), "label is float_list"),
        (example(image__encoded=image, image__class__label=("bytes_list", [b"1"])), "label is bytes_list"),
        (example(image__encoded=image, image__class__label=("int64_list", [1, 2])), "label has 2 values"),
        (example(image__encoded=image, image__class__label=("int64_list", [])), "label has 0 values"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # protobuf maps have no order of their own
)
def test_example_needs_one_image_and_one_label(payload, reason):
    with pytest.raises(BadRecordError, match=reason):
        parse_example(payload)


def test_parse_takes_a_view_of_the_record():
    record = frame(build_example(b"jpeg", 3, "x", "y", 1, 2))
    assert parse_example(unframe(record)) == (b"jpeg", 3)
