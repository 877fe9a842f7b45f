"""What `open_split` and `Split.read` refuse, each with the file and the remedy in one line; the TFRecord format."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import tfrecord

from common.errors import UserError
from imagenet_dali.dataset import open_split
from imagenet_dali.records import BadRecordError, Example, frame, masked_crc, parse_example, scan, unframe
from imagenet_dali.testing import spoil_record, with_flipped_bit
from imagenet_dali.verify import check

FIRST = "train/train-00000-of-00003"


def edit_manifest(root: Path, change: Callable[[dict], object]) -> None:
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def leave_unfinished(root: Path) -> None:
    (root / "manifest.json").unlink()
    (root / ".partial").mkdir()


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda root: (root / FIRST).unlink(), f"{FIRST}: missing; copy the data set again"),
    "truncated shard": (lambda root: truncate(root / FIRST), rf"{FIRST}: \d+ bytes, not \d+ as in the manifest; copy"),
    "missing table": (lambda root: (root / "records/train.npy").unlink(), "train.npy: missing, or differs from the"),
    "changed table": (lambda root: truncate(root / "records/train.npy"), "train.npy: missing, or differs from the"),
    "short labels": (lambda root: (root / "labels.txt").write_text("one\n"), "labels.txt: 1 lines, not 2; copy"),
    "another format": (lambda root: edit_manifest(root, lambda of: of.update(format=2)), "format: Input should be 1"),
    "no split": (lambda root: edit_manifest(root, lambda of: of["splits"].pop("train")), "no train split, only val"),
    "no manifest": (
        lambda root: (root / "manifest.json").unlink(),
        "prepare SOURCE DEST` and name.* --adopt",
    ),
    "unfinished": (leave_unfinished, "preparation was stopped; rerun the command"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_files_that_do_not_fit_the_manifest_are_refused(data: Path, name: str) -> None:
    corrupt, message = FAULTS[name]
    corrupt(data)
    with pytest.raises(UserError, match=message) as caught:
        open_split(data, "train")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="nowhere: no such folder"):
        open_split(data / "nowhere", "train")


def test_a_manifest_of_an_older_version_is_read(data: Path) -> None:
    before = open_split(data, "train").fingerprint
    edit_manifest(data, lambda manifest: manifest.update(repairs=[{"fingerprint": "", "records": 1, "dropped": [""]}]))
    edit_manifest(data, lambda manifest: manifest["splits"]["train"]["shards"][0].update(index_sha256="0"))
    assert open_split(data, "train").fingerprint == before


def test_a_record_that_went_bad_is_named(data: Path) -> None:
    path = spoil_record(data, "train", 3)
    split = open_split(data, "train")  # sizes and tables are right: only reading the record can tell
    split.read(2)
    place = f"{path}: record 3 of train at byte {split.records[3]['offset']}"
    with pytest.raises(UserError, match=f"{place}: checksum of the data does not match; copy the data set again"):
        split.read(3)
    truncate(split.shards[2])
    with pytest.raises(UserError, match=f"{split.shards[2]}: record 239 .*: length field says"):
        split.read(len(split) - 1)
    split.shards[2].unlink()
    with pytest.raises(UserError, match="No such file"):
        split.read(len(split) - 1)
    faults = check(data, 1)
    assert [fault.partition("; ")[0] for fault in faults] == [f"{split.shards[2]}: missing"]


def example(**features: tuple[str, list]) -> bytes:
    message = Example()
    for key, (kind, values) in features.items():
        getattr(message.features.feature[key.replace("__", "/")], kind).value.extend(values)
    return message.SerializeToString()


image, label = ("bytes_list", [b"jpeg"]), ("int64_list", [7])


def test_records_equal_those_of_another_writer(tmp_path: Path) -> None:
    writer = tfrecord.TFRecordWriter(str(tmp_path / "theirs"))
    writer.write({"image/encoded": (b"jpeg", "byte"), "image/class/label": (7, "int")})
    writer.close()
    [(offset, record)] = scan(tmp_path / "theirs")
    assert (offset, len(record)) == (0, (tmp_path / "theirs").stat().st_size)
    payload = example(image__encoded=image, image__class__label=label)
    assert Example.FromString(unframe(record)) == Example.FromString(payload)
    assert frame(bytes(unframe(record))) == record
    assert parse_example(unframe(record)) == (b"jpeg", 7)


def test_any_flipped_bit_and_another_size_are_found() -> None:
    record = frame(b"payload")
    assert unframe(record) == b"payload"
    for position in range(len(record)):
        with pytest.raises(BadRecordError, match="checksum"):
            unframe(with_flipped_bit(record, position))
    for other, reason in ((record + b"x", "length field says 7"), (record[:-1], "length field"), (b"", "truncated")):
        with pytest.raises(BadRecordError, match=reason):
            unframe(other)


def test_scan_stops_where_the_next_record_cannot_be_found(tmp_path: Path) -> None:
    first, second, long = frame(b"one"), frame(b"two"), struct.pack("<Q", 2**40)
    cases = {
        first + second[:-1]: "truncated",
        first + second[:5]: "truncated",
        first + with_flipped_bit(second, 0): "checksum of the length",
        first + long + struct.pack("<I", masked_crc(long)) + b"x" * 100: "truncated",
        first + b"\x1f\x8b" + bytes(100): "gunzip",
    }
    for content, reason in cases.items():
        (tmp_path / "shard").write_bytes(content)
        records = scan(tmp_path / "shard")
        assert next(records) == (0, first)
        with pytest.raises(BadRecordError, match=reason):
            next(records)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xff\xff\xff", "not a tf.train.Example"),
        (example(image__encoded=image), "0 values in image/class/label as int64_list, not one"),
        (example(image__encoded=("int64_list", [1]), image__class__label=label), "0 values in image/encoded as bytes"),
        (example(image__encoded=("bytes_list", [b"a", b"b"]), image__class__label=label), "2 values in image/encoded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # protobuf maps have no order of their own
)
def test_example_needs_one_image_and_one_label(payload: bytes, reason: str) -> None:
    with pytest.raises(BadRecordError, match=reason):
        parse_example(payload)
