"""Framing and Examples compared with the `tfrecord` package; every way in which a shard can be broken."""

import struct

import pytest
import tfrecord

from imagenet_dali.records import (
    BadRecordError,
    Example,
    frame,
    masked_crc,
    parse_example,
    scan,
    unframe,
)
from imagenet_dali.testing import with_flipped_bit


def example(**features):
    message = Example()
    for key, (kind, values) in features.items():
        getattr(message.features.feature[key.replace("__", "/")], kind).value.extend(values)
    return message.SerializeToString()


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


def test_any_flipped_bit_is_found():
    record = frame(b"payload")
    assert unframe(record) == b"payload"
    for position in range(len(record)):
        with pytest.raises(BadRecordError, match="checksum"):
            unframe(with_flipped_bit(record, position))


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
        with_flipped_bit(whole, first): "checksum of the length",
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
    (tmp_path / "empty").touch()
    assert list(scan(tmp_path / "empty")) == []


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
