"""Sources of the same images make the same data set; what is no source is refused by name."""

import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow.parquet import write_table
from scipy.io import savemat
from torchvision.datasets.folder import IMG_EXTENSIONS

from common.errors import UserError
from common.shards import prepare
from common.shards.find_images import list_source
from common.testing.commands import read_folder
from imagenet_dali.testing import jpeg, write_images

CLASSES = ["n01", "n02", "n03"]
WORDS = ["tench, Tinca tinca", "goldfish", "great white shark"]
KIT = "ILSVRC2012_devkit_t12.tar.gz"
Files = dict[str, bytes]  # content by path


def fill(root: Path, files: Files) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def tar_of(members: Files, mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


Row = tuple[str | None, bytes, int | None]  # path, content and label


def parquet_of(rows: Sequence[Row], names: Sequence[str] = ()) -> bytes:
    """Return a file of paths, images and labels, four to a row group, with another of each kind.

    ``names`` are of the classes, as the datasets library writes them.
    """
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    columns = {"id": pa.int64(), "mask": image, "image": image, "label": pa.int64()}
    features = {"id": {"names": ["of another task"]}, "label": {"names": names}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    records = [
        {"id": 0, "image": {"bytes": data, "path": name}, "label": label}
        for name, data, label in rows
    ]
    table = pa.Table.from_pylist(records, pa.schema(columns, metadata))
    return written(table, row_group_size=4)


def written(table: pa.Table, **options: int) -> bytes:
    buffer = io.BytesIO()
    write_table(table, buffer, **options)
    return buffer.getvalue()


def devkit_of(labels: list[int]) -> bytes:
    """Return ImageNet's archive of the classes and of the validation images' labels."""
    # the numbers are in another order than the synsets, and the last one is of a group of classes
    synsets = [(8, CLASSES[0], WORDS[0]), (7, CLASSES[1], WORDS[1]), (9, CLASSES[2], WORDS[2])]
    synsets.append((10, "n00", "fish"))
    columns = [("ILSVRC2012_ID", "i4"), ("WNID", "O"), ("words", "O")]
    matrix = io.BytesIO()
    savemat(matrix, {"synsets": np.array(synsets, columns)[:, None]})
    truth = "".join(f"{[8, 7, 9][label]}\n" for label in labels)
    return tar_of(
        {
            "kit/data/meta.mat": matrix.getvalue(),
            "kit/data/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
        },
        "w:gz",
    )


def test_every_source_of_the_same_images_makes_the_same_data_set(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("common.shards.writer.ROWS_IN_MEMORY", 4)  # a shard has 10
    labels = [2, 0, 1, 1, 0, 0]
    kit = {KIT: devkit_of(labels)}
    folder = write_images(tmp_path / "folder/train", 10, CLASSES).parent
    train = [(name, data, CLASSES.index(name[6:9])) for name, data in read_folder(folder).items()]
    validation = [(f"val/v_{n}.JPEG", jpeg(50, 60, n), label) for n, label in enumerate(labels)]
    fill(folder, kit | {name: data for name, data, _ in validation})

    classes = {}
    for number, synset in enumerate(CLASSES):
        members = {name[10:]: data for name, data, label in train if label == number}
        classes[f"{synset}.tar"] = tar_of(members)
    flat = tar_of({name[4:]: data for name, data, _ in reversed(validation)})
    fill(
        tmp_path / "tars",
        kit | {"ILSVRC2012_img_train.tar": tar_of(classes), "ILSVRC2012_img_val.tar": flat},
    )
    parts = {"train-0": train[::2], "train-1": train[1::2], "validation-2": validation}
    for name, part in parts.items():
        members = {}
        for path, data, label in part:
            members[path] = data
            members[f"{path.split('.')[0]}.cls"] = b"%d" % label
        fill(tmp_path / "webdataset", {f"{name}.tar": tar_of(members)})
        fill(tmp_path / "parquet/data", {f"{name}.parquet": parquet_of(part, WORDS)})
    fill(tmp_path, {"webdataset/labels.txt": "\n".join(WORDS).encode(), "parquet/docs/a.md": b""})
    made = []
    for source in ("folder", "tars", "webdataset", "parquet"):
        prepare.prepare(tmp_path / source, tmp_path / "made" / source, shards=3)
        made.append(read_folder(tmp_path / "made" / source))
        del made[-1]["manifest.json"]
    assert made == made[:1] * 4
    assert made[0]["labels.txt"].decode().splitlines() == WORDS
    said = capsys.readouterr().out
    columns = "images of column image, labels of label; not used: id, mask\n"
    assert said.count(f"train-0.parquet: {columns}") == 1

    for source in ("folder", "tars"):
        with pytest.raises(UserError, match=f"{source}: no test split, only train, validation; na"):
            list_source(tmp_path / source, split="test")
    (folder / "train/n03").rename(tmp_path / "n03")
    with pytest.raises(UserError, match="n03 is no class of the training images; complete the do"):
        list_source(folder)
    (folder / "val/v_0.JPEG").unlink()
    with pytest.raises(UserError, match="6 labels for 5 files in .*val; complete the download"):
        list_source(folder)


def test_class_folders_are_split_by_class(tmp_path):
    names = [f"b/{i}{IMG_EXTENSIONS[i % 9]}" for i in range(20)]
    names += [f"a/{i}" for i in range(10)] + ["c/x/0.jpg"]
    hidden = (".git/x", "@eaDir/1.jpg/2.jpg", "a/.cache/1.jpg", "a/@eaDir/1.jpg/2.jpg")
    fill(tmp_path, dict.fromkeys((*names, *hidden, "a/1.jpg.1", "a/1.db", "z.jpg"), b"1"))
    (tmp_path / "a/again").symlink_to(tmp_path / "a")
    (tmp_path / "c/x/more").symlink_to(tmp_path / "b")
    source = list_source(tmp_path)
    assert source.class_names == ["a", "b", "c"]
    assert source.summary == (
        f"{tmp_path}: 3 classes (a, b, c), 8 to 17 train images each; 3 files ignored, such as "
        f"{tmp_path}/a/1.db"
    )
    assert Counter(label for _, label in source.splits["validation"]) == {0: 2, 1: 5, 2: 4}
    assert source.validation.startswith("11 of 51 images, about 20% of each class, held out of tr")


def test_an_image_keeps_its_side_whatever_comes_or_goes(tmp_path):
    def sides(root: Path, **options: bool) -> dict[str, str]:
        splits = list_source(root, **options).splits
        return {name.removeprefix("train/"): side for side in splits for name, _ in splits[side]}

    files = {f"{c}/{i}.jpg": b"1" for c in "bcd" for i in range(40)}
    less = fill(tmp_path / "less", files)
    more = fill(tmp_path / "more/train", files)
    (less / "d/7.jpg").unlink()
    fill(more, dict.fromkeys(("a/1.jpg", "a/2.jpg", "b/-.jpg", "c/new.jpg", "e/1.jpg"), b"1"))
    before = sides(less)
    after = sides(more.parent)
    assert before.items() < after.items()
    assert {after["a/1.jpg"], after["a/2.jpg"]} == {"train", "validation"}
    assert after["e/1.jpg"] == "train"
    assert not sides(less, by_count=True).items() < sides(more.parent, by_count=True).items()


SPLIT_FOLDERS = [
    ("train", "val", "test"),
    ("Training", "validation", "Testing"),
    ("training_set", "DEV", "test_set"),
    ("seg_train", "seg_val", "seg_test"),
    ("train2017", "val2017", "eval"),
]


@pytest.mark.parametrize(("train", "name", "test"), SPLIT_FOLDERS)
def test_split_folders_have_one_of_these_names_and_test_is_for_requests(
    tmp_path, train, name, test
):
    names = (f"{train}/a/1", f"{train}/b/deep/er/2", f"{name}/b/3", f"{test}/a/4")
    source = list_source(fill(tmp_path, dict.fromkeys(names, b"1")))
    expected = [(f"{train}/a/1", 0), (f"{train}/b/deep/er/2", 1)]
    assert source.splits == {"train": expected, "validation": [(f"{name}/b/3", 1)]}
    assert source.validation == f"{name}/; test is left out, prepare and evaluate take --split test"
    assert list_source(tmp_path, split="test").splits == {"test": [(f"{test}/a/4", 0)]}
    with pytest.raises(UserError, match="share=0.5: .* has a validation split already"):
        list_source(tmp_path, validation_share=0.5)


def test_a_class_behind_a_broken_link_is_refused(tmp_path):
    fill(tmp_path, TRAIN)
    (tmp_path / "train/c").symlink_to("gone")
    with pytest.raises(UserError, match="train/c: a link to gone, which is not there; mend or rem"):
        list_source(tmp_path)


def test_samples_of_one_name_are_all_there(tmp_path):
    views = {"0.bmp": b"another", "0.mask.jpg": b"", "0.gif": b"", "0.jpg": b"", "0.cls": b"0"}
    samples = tar_of(views | {"1.TIFF": b"", "1.cls": b"1", "2.gif": b"", "2.cls": b"2"})
    tars = dict.fromkeys(("Training/0.tar", "train_test/train-1.tar", "val0/0.tar"), samples)
    source = list_source(fill(tmp_path, tars | {"testing-0.tar": b""}))
    listed = {}
    for container in tars:
        # A kind that is not read is listed all the same, so that it is refused and counted.
        names = "0/0.jpg", "1/1.TIFF", "2/2.gif"
        listed[container] = [(f"{container}/{name}", label) for label, name in enumerate(names)]
    first, second, validation = listed.values()
    assert source.splits == {"train": first + second, "validation": validation}
    before = source.fingerprint
    os.utime(tmp_path / "Training/0.tar", (0, 0))
    assert source.fingerprint != before


def test_rows_of_large_parquet_sources_are_shuffled_in_windows_of_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "IMAGES_PER_WINDOW", 12)
    rows = parquet_of([("a.jpg", b"1", number % 2) for number in range(40)])
    files = {"t.parquet": rows, "labels.txt": "\ufeffcat\ndog".encode()}
    source = list_source(fill(tmp_path, files), validation_share=0)
    assert source.class_names == ["cat", "dog"]
    order = list(chain(*prepare.plan_shards(source, 5).values()))
    assert sorted(order) == sorted(source.splits["train"])
    groups = [source.positions[name].row_group for name, _ in order]
    assert [len({*groups[i : i + 12]}) for i in range(0, 40, 12)] == [3, 3, 3, 1]
    assert [name for name, _ in order[:3]] == [f"t.parquet/{row}/a.jpg" for row in (10, 26, 6)]


FLAT = {"a/1": b"", "b/2": b""}
TINY = "val/val_annotations.txt"
TRAIN = {"train/a/1": b"", "train/b/2": b""}
TAR = tar_of({"a.jpg": b"1", "a.cls": b"1", "b.jpg": b"1", "b.cls": b"0"})
REFUSED: list[tuple[Files, str]] = [
    ({"wrapper/a/1": b"", "wrapper/b/2": b""}, "is .*wrapper the folder you mean"),
    ({"train/1.jpg": b"", "test/3.jpg": b""}, "train: 0 class folders, at least 2 are needed"),
    (TRAIN | {"extra/a/3": b""}, "train: named as a split, train, beside extra; sort classes i"),
    (FLAT | {"test/3.jpg": b""}, "test: named as a split, test, beside a, b; sort"),
    (TRAIN | {"val/a/3": b"", "dev/a/3": b""}, "(val|dev): named as a split, validation, beside "),
    (FLAT | {"c/a/1": b"", "c/b/2": b""}, "c: holds folders a, b and no images"),
    (
        dict.fromkeys(("fold1/a/1", "fold1/b/2", "fold2/a/3", "fold2/b/4"), b""),
        "fold2: holds folders a, b and no images, and so does .*fold1; which level are the classes",
    ),
    (TRAIN | {"val.tar": b""}, "val.tar: the validation split in an archive, beside folders; unp"),
    (
        {"val/1": b"", "ILSVRC2012_img_train.tar": b""},
        "train.tar: the train split in an archive, .*; unpack it into .*/train, or move it",
    ),
    (FLAT, "no class has images enough to hold 20% out for validation; add "),
    (TRAIN | {"val/images/3": b"", TINY: b""}, f"{TINY}: labels in a file; sort .* while read f"),
    ({"train-0.tar": b"", "more.tar": b""}, "more.tar: its path names no split, as the others do"),
    ({"train_val-0.tar": b""}, "train_val-0.tar: named as train and validation; rename it"),
    (TRAIN | {"val/v": b""}, f"no class folders; put {KIT} into"),
    (TRAIN | {"val/v": b"", KIT: tar_of({"1": b""}, "w:gz")[:40]}, f"{KIT}: .*; download it again"),
    (TRAIN | {"val/a/.3": b""}, "val: no images; they are expected as"),
    ({"train-0.tar": tar_of({})}, "no labelled images for the split train in train-0.tar"),
    (
        {"t.tar": tar_of({"a.jpg": b"1", "a.cls": b"cat"})},
        "t.tar: a.jpg: no label; its sample needs a class number",
    ),
    ({"t.tar": TAR, "labels.txt": b"cat\n\n"}, "t.tar: a.jpg: label 1, out of range for 1 classes"),
    (
        {"t.tar": tar_of({"a.jpg": b"1", "a.cls": b"5"})},
        "labels 5 to 5 with gaps; name all in .*labels.txt",
    ),
    ({"t.tar": TAR[:2048] + b"x" + TAR[2049:]}, "t.tar: compressed, truncated or damaged at a.cls"),
    (
        {"train-0.tar.gz": tar_of({"1.jpg": b"1"}, "w:gz")},
        "train-0.tar.gz: compressed, .*; run gunzip on it",
    ),
    (
        {"t.parquet": parquet_of([("a", b"1", 0)] * 4 + [("b", b"1", None)])},
        "t.parquet: b: row 4 has no label",
    ),
    (
        {"t.parquet": parquet_of([(None, None, -1)], ["a", "b"])},
        "t.parquet: t.parquet/0: label -1, out of range for 2",
    ),
    (
        {"t.parquet": parquet_of([("a.jpg", b"1", 0)], ["a", "b"])[:-5]},
        "t.parquet: .*; download it again",
    ),
    (
        {"t.parquet": written(pa.table({"image": [b"1"], "label": [0]}))},
        "columns image, label; a struct of bytes and path and an integer",
    ),
    (
        {f"{name[0]}.parquet": parquet_of([("a", b"1", 0)], name) for name in ("ab", "ba")},
        "b.parquet: its class names are not those of labels.txt or an earlier file",
    ),
]


@pytest.mark.parametrize(("files", "message"), REFUSED)
def test_what_is_no_source_is_refused(tmp_path, files, message):
    with pytest.raises(UserError, match=message):
        list_source(fill(tmp_path, files))
