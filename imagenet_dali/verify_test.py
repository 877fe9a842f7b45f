"""`--check` finds all damage; `--adopt` takes good shards made elsewhere unchanged and refuses all else."""

import json
import re
import shutil
from pathlib import Path

import pytest
import tfrecord

from common.errors import UserError
from common.testing.commands import read_folder
from imagenet_dali.dataset import open_split
from imagenet_dali.prepare import main
from imagenet_dali.records import frame, unframe
from imagenet_dali.testing import encode, gradient, jpeg, spoil_record, with_dimensions, with_flipped_bit
from imagenet_dali.verify import adopt, check


def test_check_lists_all_that_is_wrong(data: Path, capsys) -> None:
    before = read_folder(data)
    main(["--check", str(data), "--workers=2"])
    assert capsys.readouterr().out == f"{data}: every record is verified\n"
    assert read_folder(data) == before
    split = open_split(data, "train")
    first, second, _ = split.shards
    for index in (2, 5):
        spoil_record(data, "train", index)
    content, size = second.read_bytes(), split.records[80]["size"]
    second.write_bytes(frame(with_flipped_bit(bytes(unframe(content[:size])), size // 2)) + content[size:])
    faults = check(data, 1)
    assert [fault.partition("; ")[0] for fault in faults] == [
        f"{first}: record 2 of train at byte {split.records[2]['offset']}: checksum of the data does not match",
        f"{first}: record 5 of train at byte {split.records[5]['offset']}: checksum of the data does not match",
        f"{second}: content differs from the manifest (sha256)",
    ]
    with pytest.raises(UserError, match="faults found: 3; copy the data set again, or delete it and prepare it again"):
        main(["--check", str(data), "--workers=1"])
    assert capsys.readouterr().out.splitlines() == faults


def write_foreign(path: Path, samples: list[tuple[bytes, int]], **more: tuple[object, str]) -> None:
    """Write a shard with the `tfrecord` package, as another project would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = tfrecord.TFRecordWriter(str(path))
    for image, label in samples:
        writer.write({"image/encoded": (image, "byte"), "image/class/label": (label, "int"), **more})
    writer.close()


SAMPLES = [(jpeg(20 + number, 40, seed=number), number % 3 + 1) for number in range(9)]


@pytest.mark.parametrize(
    ("base", "names"), [(0, "{split}/{split}-0000{n}-of-2"), (1, "{split}-0000{n}-of-2"), (1, "{split}/part{n}")]
)
def test_foreign_shards_are_adopted_with_labels_from_0(tmp_path: Path, base: int, names: str) -> None:
    samples = [(image, label - 1 + base) for image, label in SAMPLES]
    for split in ("train", "validation"):
        for n in range(2):
            write_foreign(tmp_path / names.format(split=split, n=n), samples[5 * n : 5 * n + 5])
    shards = read_folder(tmp_path)
    assert adopt(tmp_path, None, workers=1) == []
    assert {name: content for name, content in read_folder(tmp_path).items() if name in shards} == shards
    for name in ("train", "validation"):
        split = open_split(tmp_path, name)
        assert [split.read(index) for index in range(len(split))] == [(i, y - 1) for i, y in SAMPLES]
        assert split.records["height"].tolist() == list(range(20, 29))
        assert split.class_names == ["0", "1", "2"]
    assert json.loads((tmp_path / "manifest.json").read_text())["label_base"] == base
    assert check(tmp_path, 1) == []
    with pytest.raises(UserError, match="prepared already"):
        adopt(tmp_path, None, workers=1)


def test_adopting_what_preparation_wrote_gives_the_same_tables(prepared: Path, tmp_path: Path) -> None:
    for split in ("train", "validation"):
        shutil.copytree(prepared / split, tmp_path / split)
    main(["--adopt", str(tmp_path), "--labels", str(prepared / "labels.txt"), "--workers=2"])
    ours, theirs = read_folder(prepared), read_folder(tmp_path)
    assert {name for name in ours if ours[name] != theirs[name]} == {"manifest.json"}
    assert open_split(prepared, "train").fingerprint == open_split(tmp_path, "train").fingerprint


IMAGE, LABEL = "image/encoded", "image/class/label"


@pytest.mark.parametrize(
    ("labels", "names", "more", "message"),
    [
        ([0, 1, 3], None, {}, "labels run from 0 to 3 with gaps"),
        ([2, 3], None, {}, "labels run from 2 to 3 with gaps"),
        ([1, 2], "abc", {}, "labels 1 to 2 fit 3 names counted from 0 and from 1"),
        ([0, 5], "abc", {}, "label 5, out of range for 3 classes from 0"),
        ([], None, {}, "the train shards hold no records"),
        (None, None, {}, "no shards"),
        ([1], None, {IMAGE: (encode(gradient(), "PNG"), "byte")}, "faults found: 1; leave.*record 0 at.*: not a JPEG"),
        ([1], None, {IMAGE: (jpeg()[:-20], "byte")}, "at byte 0: .*Premature end"),
        ([1], None, {IMAGE: (with_dimensions(jpeg(), 20000, 20000), "byte")}, "more than 100 million pixels"),
        (
            [1],
            None,
            {IMAGE: (encode(gradient().convert("CMYK")), "byte")},
            "which decoders turn into different colours",
        ),
        ([1], None, {IMAGE: (7, "int")}, "0 values in image/encoded as bytes_list, not one"),
        ([1], None, {LABEL: (-1, "int")}, "label -1 is no class number"),
        ([1], None, {LABEL: (2**31, "int")}, "label 2147483648 is no class number"),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path: Path, capsys, labels, names, more, message) -> None:
    if labels is not None:
        write_foreign(tmp_path / "train" / "shard", [(jpeg(), label) for label in labels], **more)
    (tmp_path / "names").write_text("".join(f"{name}\n" for name in names or ""))
    before = read_folder(tmp_path)
    with pytest.raises(UserError) as error:
        main(["--adopt", str(tmp_path), "--workers=1", *(["--labels", str(tmp_path / "names")] if names else [])])
    assert re.search(message, f"{error.value} {capsys.readouterr().out}")
    assert read_folder(tmp_path) == before
