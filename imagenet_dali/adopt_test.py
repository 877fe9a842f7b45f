"""`--adopt` takes good shards made elsewhere unchanged and refuses all else."""

import json
import shutil
from pathlib import Path

import pytest
import tfrecord

from common.errors import UserError
from common.testing.commands import read_folder
from imagenet_dali.adopt import adopt
from imagenet_dali.dataset import open_split
from imagenet_dali.prepare import main
from imagenet_dali.records import build_example, frame
from imagenet_dali.testing import encode, gradient, jpeg, with_dimensions, with_flipped_bit
from imagenet_dali.verify import check


def write_foreign(path: Path, samples: list[tuple[bytes, int]], **more: tuple[object, str]) -> None:
    """Write a shard with the `tfrecord` package, as another project would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = tfrecord.TFRecordWriter(str(path))
    for image, label in samples:
        writer.write({"image/encoded": (image, "byte"), "image/class/label": (label, "int"), **more})
    writer.close()


SAMPLES = [(jpeg(20 + number, 40, seed=number), number % 3 + 1) for number in range(9)]


@pytest.mark.parametrize("base", [0, 1])
@pytest.mark.parametrize("names", ["{split}/{split}-0000{n}-of-00002", "{split}-0000{n}-of-00002", "{split}/part{n}"])
def test_foreign_shards_are_adopted_with_labels_from_0(tmp_path, base, names):
    samples = [(image, label - 1 + base) for image, label in SAMPLES]
    for split in ("train", "validation"):
        for n in range(2):
            if "/" in names or n == 0:
                write_foreign(tmp_path / names.format(split=split, n=n), samples[5 * n : 5 * n + 5])
    shards = read_folder(tmp_path)
    assert adopt(tmp_path, None, workers=1) == []
    assert {name: content for name, content in read_folder(tmp_path).items() if name in shards} == shards
    for name in ("train", "validation"):
        split = open_split(tmp_path, name)
        count = 9 if "/" in names else 5
        assert [split.read(index) for index in range(len(split))] == [(i, y - 1) for i, y in SAMPLES[:count]]
        assert split.records["height"].tolist() == list(range(20, 20 + count))
        assert split.class_names == ["0", "1", "2"]
    assert json.loads((tmp_path / "manifest.json").read_text())["label_base"] == base
    assert check(tmp_path, 1) == []
    with pytest.raises(UserError, match="prepared already"):
        adopt(tmp_path, None, workers=1)


def test_adopting_what_preparation_wrote_gives_the_same_tables(prepared, tmp_path):
    for split in ("train", "validation"):
        shutil.copytree(prepared / split, tmp_path / split)
    main(["--adopt", str(tmp_path), "--labels", str(prepared / "labels.txt"), "--workers=2"])
    ours, theirs = read_folder(prepared), read_folder(tmp_path)
    assert {name for name in ours if ours[name] != theirs[name]} == {"manifest.json"}
    assert open_split(prepared, "train").fingerprint == open_split(tmp_path, "train").fingerprint


def write_names(folder: Path, names: str | None) -> Path | None:
    if names is None:
        return None
    (folder / "names").write_text("".join(f"{name}\n" for name in names) + "\n")
    return folder / "names"


@pytest.mark.parametrize(("labels", "base"), [([0, 2, 3], 0), ([1, 2, 4], 1)])
def test_names_decide_how_many_classes_there_are(tmp_path, labels, base):
    write_foreign(tmp_path / "train" / "shard", [(jpeg(), label) for label in labels])
    assert adopt(tmp_path, write_names(tmp_path, "abcd"), workers=1) == []
    split = open_split(tmp_path, "train")
    assert split.class_names == ["a", "b", "c", "d"]
    assert split.records["label"].tolist() == [label - base for label in labels]


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        ([0, 1, 3], None, "labels run from 0 to 3 without 2"),
        ([2, 3], None, "labels run from 2 to 3 without 1"),
        ([1, 2], "abc", "labels 1 to 2 fit 3 names counted from 0 and from 1"),
        ([1, 2], "", "names: empty"),
        ([], None, "the train shards hold no records"),
        (None, None, "no shards"),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path, labels, names, message):
    if labels is not None:
        write_foreign(tmp_path / "train" / "shard", [(jpeg(), label) for label in labels])
    path = write_names(tmp_path, names)
    before = read_folder(tmp_path)
    with pytest.raises(UserError, match=message):
        adopt(tmp_path, path, workers=1)
    assert read_folder(tmp_path) == before
    with pytest.raises(UserError, match="nowhere: no such folder"):
        adopt(tmp_path / "nowhere", None, workers=1)


IMAGE, LABEL = "image/encoded", "image/class/label"


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (IMAGE, (encode(gradient(), "PNG"), "byte"), "not a JPEG"),
        (IMAGE, (b"", "byte"), "not a JPEG"),
        (IMAGE, (jpeg()[:-20], "byte"), "Premature end"),
        (IMAGE, (with_dimensions(jpeg(), 20000, 20000), "byte"), "more than 100 million pixels"),
        (IMAGE, (encode(gradient().convert("CMYK")), "byte"), "JPEG, which decoders turn into different colours"),
        (IMAGE, (7, "int"), "image/encoded is int64_list"),
        (LABEL, (-1, "int"), "label -1 is no class number"),
        (LABEL, (2**31, "int"), "label 2147483648 is no class number"),
        (LABEL, (99999, "int"), "label 99999, out of range for 3 classes from 0"),
    ],
)
def test_a_bad_record_is_listed_and_nothing_is_written(tmp_path, capsys, key, value, reason):
    path = tmp_path / "train" / "shard"
    write_foreign(path, [(jpeg(), 0), (jpeg(), 2)])
    good = path.read_bytes()
    write_foreign(path, [(jpeg(), 1)], **{key: value})
    path.write_bytes(good + path.read_bytes() + good)
    labels = write_names(tmp_path, "abc")
    before = read_folder(tmp_path)
    with pytest.raises(UserError, match="faults found: 1; --adopt --repair continues without"):
        main(["--adopt", str(tmp_path), "--labels", str(labels), "--workers=1"])
    listed = capsys.readouterr().out
    assert f"{path}: record 2 at byte {len(good)}: " in listed
    assert reason in listed
    assert read_folder(tmp_path) == before


def test_few_bad_records_may_be_left_out(tmp_path, capsys):
    records = [frame(build_example(jpeg(20, 30, number), number % 2, "", "", 20, 30)) for number in range(300)]
    records[7] = with_flipped_bit(records[7], len(records[7]) // 2)
    records[40] = frame(build_example(encode(gradient(), "PNG"), 0, "", "", 24, 40))
    shard = tmp_path / "train" / "shard"
    shard.parent.mkdir()
    shard.write_bytes(b"".join(records) + records[0][:-1])
    main(["--adopt", "--repair", str(tmp_path), "--workers=1"])
    offsets = [sum(map(len, records[:number])) for number in (7, 40, 300)]
    reasons = ("checksum of the data does not match", "not a JPEG", "truncated")
    lines = capsys.readouterr().out.splitlines()[:3]
    places = [f"{shard}: record {number} at byte {at}: " for number, at in zip((7, 40, 300), offsets, strict=True)]
    assert lines == [place + reason for place, reason in zip(places, reasons, strict=True)]
    split = open_split(tmp_path, "train")
    assert split.records["label"].tolist() == [number % 2 for number in range(300) if number not in (7, 40)]
    assert check(tmp_path, 1) == []
    dropped = json.loads((tmp_path / "manifest.json").read_text())["made"]["dropped"]
    assert [f"{tmp_path}/{line}" for line in dropped] == lines


def test_more_bad_records_than_allowed_are_not_left_out(tmp_path):
    write_foreign(tmp_path / "train" / "shard", [(image, label) for image, label in SAMPLES if label != 2])
    content = (tmp_path / "train" / "shard").read_bytes()
    (tmp_path / "train" / "shard").write_bytes(content[:-1])
    before = read_folder(tmp_path)
    with pytest.raises(UserError, match="bytes are bad, more than 1%; repair the files"):
        adopt(tmp_path, None, workers=1, max_refused=0.01)
    assert read_folder(tmp_path) == before
