"""`--check` finds all damage; `--adopt` takes good shards of others unchanged, and no others."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tfrecord

from common.errors import UserError
from common.shards.dataset import open_split
from common.shards.prepare import main
from common.shards.tfrecord_format import frame
from common.testing.commands import read_folder
from imagenet_dali.testing import encode, gradient, jpeg, spoil_record, with_flipped_bit


def test_check_lists_all_that_is_wrong(data, capsys):
    words = ["--check", str(data)]
    main([*words, "--workers=2"])
    assert capsys.readouterr().out == f"{data}: every record is verified\n"
    train = spoil_record(data, "train", 2)
    validation = spoil_record(data, "validation", 5)
    remedy = "copy the data set again, or delete it and prepare it again"
    with pytest.raises(UserError, match=f"faults found: 2; {remedy}"):
        main([*words, "--workers=1"])
    assert capsys.readouterr().out.splitlines() == [
        f"{train}: differs from the manifest",
        f"{validation}: differs from the manifest",
    ]
    train.unlink()
    with pytest.raises(UserError, match="faults found: 1"):
        main(words)
    assert capsys.readouterr().out == f"{train}: missing\n"
    (data / "records/validation.npy").write_bytes(b"")
    with pytest.raises(UserError, match="validation.npy: missing, or differs from the manifest"):
        main(words)


IMAGE = "image/encoded"
LABEL = "image/class/label"


def write_foreign(path: Path, samples: list[tuple[bytes, int]], **more: tuple[object, str]) -> None:
    """Write a shard with the `tfrecord` package, as another project would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = tfrecord.TFRecordWriter(str(path))
    for image, label in samples:
        features = {
            IMAGE: (image, "byte"),
            LABEL: (label, "int"),
        }
        writer.write(features | more)
    writer.close()


def adopt(folder: Path, *options: str) -> None:
    main(["--adopt", str(folder), "--workers=1", *options])


# Nine images of three classes: a grey one, the others in colour; from 20 to 28 pixels high.
SAMPLES = [(encode(gradient(20, 40, 0).convert("L")), 0)]
for number in range(1, 9):
    image = gradient(20 + number, 40, number)
    SAMPLES.append((encode(image), number % 3))


@pytest.mark.parametrize(
    ("base", "names", "validation"),
    [
        (0, "{split}/{split}-0000{n}-of-2", "Val"),
        (1, "{split}-0000{n}-of-2", "validation"),
    ],
)
def test_foreign_shards_are_adopted_with_labels_from_0(tmp_path, capsys, base, names, validation):
    samples = [(image, label + base) for image, label in SAMPLES]
    unused = ["other/train-0", "test-0"]
    if "/" in names:  # beside the folder train
        unused.append("train-2")
    (tmp_path / "other").mkdir()
    for name in unused:
        (tmp_path / name).write_text("left out")
    for split in ("train", validation):
        for n, part in enumerate([samples[:5], samples[5:]]):
            shard = tmp_path / names.format(split=split, n=n)
            write_foreign(shard, part)
            shard.with_suffix(".idx").write_text("0 1\n")  # DALI's tfrecord2idx writes such files
            shard.with_name(".hidden").write_text("0 1\n")
    if base:
        (tmp_path / "labels.txt").write_text("0\n1\n2\n")
    shards = read_folder(tmp_path)
    adopt(tmp_path)
    said = f"not used: {len(unused)} files, {', '.join(unused)}\n"
    assert capsys.readouterr().out.startswith(said)
    assert read_folder(tmp_path).items() >= shards.items()
    for name in ("train", "validation"):
        split = open_split(tmp_path, name)
        assert [split.read(index) for index in range(len(split))] == SAMPLES
        assert split.records["height"].tolist() == [20, 21, 22, 23, 24, 25, 26, 27, 28]
        assert split.class_names == ["0", "1", "2"]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["label_base"] == base
    with pytest.raises(UserError, match="prepared already"):
        main(["--adopt", str(tmp_path)])


CMYK = encode(gradient().convert("CMYK"))
PNG = encode(gradient(), "PNG")
FIRST = frame(b"one")
SECOND = frame(b"two")
DAMAGED_LENGTH = with_flipped_bit(SECOND, 0)
GZIP = b"\x1f\x8b" + bytes(100)


@pytest.fixture
def assert_refused(tmp_path, capsys) -> Callable[[str], None]:
    """Return what expects that the shards are refused and left as they were."""

    def check(message: str) -> None:
        before = read_folder(tmp_path)
        with pytest.raises(UserError) as error:
            adopt(tmp_path)
        printed = capsys.readouterr().out
        assert re.search(message, f"{error.value} {printed}")
        (tmp_path / "refused.txt").unlink(missing_ok=True)
        assert read_folder(tmp_path) == before

    return check


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        ([0, 1], "", "no validation shards: they are"),
        ([0, 1, 3], "", "labels run from 0 to 3 with gaps"),
        ([1, 2], "abc", "labels 1 to 2 fit 3 names counted from 0 and from 1"),
        ([0, 5], "abc", "label 5, out of range for 3 classes from 0"),
        ([2, 3], "", "labels run from 2 to 3 with gaps"),
    ],
)
def test_labels_that_fit_no_classes_are_refused(tmp_path, assert_refused, labels, names, message):
    write_foreign(tmp_path / "train/shard", [(jpeg(), label) for label in labels])
    if names:
        (tmp_path / "labels.txt").write_text("\n".join(names))
    assert_refused(message)


@pytest.mark.parametrize(
    ("count", "feature", "message"),
    [
        (
            21,
            {IMAGE: (PNG, "byte")},
            "21 images refused, more than 1% of 21; .* at byte 0: not.*\n(.*\n){19}.* 1 m",
        ),
        (
            1,
            {IMAGE: (7, "int")},
            r"not a tf.train.Example with one image/encoded \(bytes\)",
        ),
        (
            1,
            {LABEL: (-1, "int")},
            "label -1 is no class number",
        ),
    ],
)
def test_features_that_are_no_labelled_jpeg_are_refused(
    tmp_path, assert_refused, count, feature, message
):
    write_foreign(tmp_path / "train/shard", [(jpeg(), 1)] * count, **feature)
    assert_refused(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (FIRST + FIRST + SECOND[:-1], "truncated, after 2 records, at byte 38"),
        (FIRST + DAMAGED_LENGTH, "checksum of the length"),
        (FIRST + GZIP, "gunzip"),
        (b"\x00", "truncated, after 0 records, at byte 0"),
        (b"", "shard: no records"),
    ],
)
def test_a_shard_whose_next_record_cannot_be_found_is_refused(
    tmp_path, assert_refused, content, message
):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/shard").write_bytes(content)
    assert_refused(message)


def test_all_shards_that_cannot_be_read_are_named(tmp_path, capsys):
    write_foreign(tmp_path / "train-0", SAMPLES)
    (tmp_path / "train-1").write_bytes(FIRST[:-1])
    (tmp_path / "validation-0").write_bytes(b"")
    with pytest.raises(UserError, match=f"^{tmp_path}: of 2 shards not all records are found"):
        adopt(tmp_path)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}/train-1:")
    assert second.startswith(f"{tmp_path}/validation-0:")


def test_bad_records_are_left_out_up_to_a_share(tmp_path, capsys):
    good = [(jpeg(seed=number), number % 3) for number in range(30)]
    extraneous = jpeg()[:-2] + b"abc\xff\xd9"  # before the marker of the end
    write_foreign(tmp_path / "train-0", [*good[:15], (extraneous, 1), *good[15:]])
    write_foreign(tmp_path / "validation-0", [*good, (CMYK, 1)])
    shards = read_folder(tmp_path)
    adopt(tmp_path, "--max-refused=0.04")
    lines = (tmp_path / "refused.txt").read_text()
    first = ".*train-0: record 15 at .*extraneous.*\n"
    second = ".*n-0: record 30 .*CMYK.*\n"
    assert re.fullmatch(first + second, lines)
    done = "every record is verified but 2 bad ones, left out and listed in refused.txt"
    assert capsys.readouterr().out == f"{lines}{tmp_path}: {done}\n"
    assert read_folder(tmp_path).items() >= shards.items()
    assert open_split(tmp_path, "train").read_span(0, 30) == good
