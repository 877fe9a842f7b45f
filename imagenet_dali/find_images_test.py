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
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def fill_empty(root: Path, *names: str) -> Path:
    """Write files whose content nobody reads."""
    return fill(root, dict.fromkeys(names, b""))


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
    columns = {
        "id": pa.int64(),
        "mask": image,
        "image": image,
        "label": pa.int64(),
    }
    features = {
        "id": {"names": ["of another task"]},
        "label": {"names": names},
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    records = []
    for name, data, label in rows:
        content = {"bytes": data, "path": name}
        records.append({"id": 0, "image": content, "label": label})
    table = pa.Table.from_pylist(records, pa.schema(columns, metadata))
    return written(table, row_group_size=4)


def written(table: pa.Table, **options: int) -> bytes:
    buffer = io.BytesIO()
    write_table(table, buffer, **options)
    return buffer.getvalue()


def devkit_of(labels: list[int]) -> bytes:
    """Return ImageNet's archive of the classes and of the validation images' labels."""
    # the numbers are in another order than the synsets, and the last one is of a group of classes
    numbers = [8, 7, 9]
    synsets = [*zip(numbers, CLASSES, WORDS, strict=True), (10, "n00", "fish")]
    columns = [("ILSVRC2012_ID", "i4"), ("WNID", "O"), ("words", "O")]
    matrix = io.BytesIO()
    savemat(matrix, {"synsets": np.array(synsets, columns)[:, None]})
    truth = "".join(f"{numbers[label]}\n" for label in labels)
    members = {
        "kit/data/meta.mat": matrix.getvalue(),
        "kit/data/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
    }
    return tar_of(members, "w:gz")


# Images of the data set that each kind of source holds: path, content and label.
VALIDATION_LABELS = [2, 0, 1, 1, 0, 0]
VALIDATION = [
    (f"val/v_{number}.JPEG", jpeg(50, 60, number), label)
    for number, label in enumerate(VALIDATION_LABELS)
]


def write_class_folders(root: Path) -> list[Row]:
    """Write ImageNet's folders, with its archive of labels; return the training images."""
    write_images(root / "train", 10, CLASSES)
    train = []
    for name, data in read_folder(root).items():
        synset = name.split("/")[1]
        train.append((name, data, CLASSES.index(synset)))
    fill(root, {name: data for name, data, _ in VALIDATION})
    fill(root, {KIT: devkit_of(VALIDATION_LABELS)})
    return train


def write_imagenet_archives(root: Path, train: list[Row]) -> None:
    """Write ImageNet's archives: of classes, each an archive of images, and of validation."""
    classes = {}
    for number, synset in enumerate(CLASSES):
        members = {}
        for path, data, label in train:
            if label == number:
                members[path.removeprefix(f"train/{synset}/")] = data
        classes[f"{synset}.tar"] = tar_of(members)
    images = {}
    for path, data, _ in reversed(VALIDATION):
        images[path.removeprefix("val/")] = data
    archives = {
        KIT: devkit_of(VALIDATION_LABELS),
        "ILSVRC2012_img_train.tar": tar_of(classes),
        "ILSVRC2012_img_val.tar": tar_of(images),
    }
    fill(root, archives)


def webdataset_of(rows: list[Row]) -> bytes:
    """Return a tar with the image and the class number of each sample."""
    members = {}
    for path, data, label in rows:
        stem, _ = path.split(".")
        members[path] = data
        members[f"{stem}.cls"] = str(label).encode()
    return tar_of(members)


def shards_of(folder: Path, source: Path) -> Files:
    """Return the files that the source is prepared as, but for the manifest, which names it."""
    prepare.prepare(source, folder, shards=3)
    files = read_folder(folder)
    del files["manifest.json"]
    return files


def test_every_source_of_the_same_images_makes_the_same_data_set(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("common.shards.writer.ROWS_IN_MEMORY", 4)  # a shard has 10
    train = write_class_folders(tmp_path / "folder")
    write_imagenet_archives(tmp_path / "tars", train)
    parts = {
        "train-0": train[::2],
        "train-1": train[1::2],
        "validation-2": VALIDATION,
    }
    for name, rows in parts.items():
        fill(tmp_path / "webdataset", {f"{name}.tar": webdataset_of(rows)})
        fill(tmp_path / "parquet/data", {f"{name}.parquet": parquet_of(rows, WORDS)})
    (tmp_path / "webdataset/labels.txt").write_text("\n".join(WORDS))
    fill_empty(tmp_path / "parquet", "docs/a.md")

    shards = tmp_path / "shards"
    expected = shards_of(shards / "folder", tmp_path / "folder")
    assert expected["labels.txt"].decode().splitlines() == WORDS
    for source in ("tars", "webdataset", "parquet"):
        assert shards_of(shards / source, tmp_path / source) == expected
    said = capsys.readouterr().out
    columns = "images of column image, labels of label; not used: id, mask\n"
    assert said.count(f"train-0.parquet: {columns}") == 1


def test_a_test_split_that_imagenet_has_not_is_refused(tmp_path):
    train = write_class_folders(tmp_path / "folder")
    write_imagenet_archives(tmp_path / "tars", train)
    for source in ("folder", "tars"):
        message = f"{source}: no test split, only train, validation; na"
        with pytest.raises(UserError, match=message):
            list_source(tmp_path / source, split="test")


def test_an_incomplete_imagenet_is_refused(tmp_path):
    folder = tmp_path / "folder"
    write_class_folders(folder)
    (folder / "train/n03").rename(tmp_path / "n03")
    with pytest.raises(UserError, match="n03 is no class of the training images; complete the do"):
        list_source(folder)
    (folder / "val/v_0.JPEG").unlink()
    with pytest.raises(UserError, match="6 labels for 5 files in .*val; complete the download"):
        list_source(folder)


def test_class_folders_are_split_by_class(tmp_path):
    names = ["c/x/0.jpg"]
    names += [f"a/{i}" for i in range(10)]
    names += [f"b/{i}{IMG_EXTENSIONS[i % 9]}" for i in range(20)]
    hidden = [
        ".git/x",
        "@eaDir/1.jpg/2.jpg",
        "a/.cache/1.jpg",
        "a/@eaDir/1.jpg/2.jpg",
    ]
    ignored = ["a/1.jpg.1", "a/1.db", "z.jpg"]
    fill_empty(tmp_path, *names, *hidden, *ignored)
    (tmp_path / "a/again").symlink_to(tmp_path / "a")
    (tmp_path / "c/x/more").symlink_to(tmp_path / "b")
    source = list_source(tmp_path)
    assert source.class_names == ["a", "b", "c"]
    assert source.summary == (
        f"{tmp_path}: 3 classes (a, b, c), 8 to 17 train images each; 3 files ignored, such as "
        f"{tmp_path}/a/1.db"
    )
    validation_labels = [label for _, label in source.splits["validation"]]
    assert Counter(validation_labels) == {0: 2, 1: 5, 2: 4}
    assert source.validation.startswith("11 of 51 images, about 20% of each class, held out of tr")


def sides(root: Path, **options: bool) -> dict[str, str]:
    """Return the split of each image."""
    found = {}
    for split, images in list_source(root, **options).splits.items():
        for name, _ in images:
            found[name.removeprefix("train/")] = split
    return found


@pytest.fixture
def fewer(tmp_path) -> Path:
    """A data set of three classes."""
    names = [f"{folder}/{i}.jpg" for folder in "bcd" for i in range(40)]
    names.remove("d/7.jpg")
    return fill_empty(tmp_path / "fewer", *names)


@pytest.fixture
def more(tmp_path, fewer) -> Path:
    """The same images with others before, among and after them, in a folder train."""
    names = ["a/1.jpg", "a/2.jpg", "b/-.jpg", "c/new.jpg", "d/7.jpg", "e/1.jpg"]
    train = tmp_path / "more/train"
    fill(train, read_folder(fewer))
    fill_empty(train, *names)
    return tmp_path / "more"


def test_an_image_keeps_its_side_whatever_comes_or_goes(fewer, more):
    before = sides(fewer)
    after = sides(more)
    assert before.items() < after.items()
    assert {after["a/1.jpg"], after["a/2.jpg"]} == {"train", "validation"}
    assert after["e/1.jpg"] == "train"


def test_an_image_that_is_split_by_count_may_change_its_side(fewer, more):
    before = sides(fewer, by_count=True)
    after = sides(more, by_count=True)
    assert not before.items() < after.items()


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
    fill_empty(
        tmp_path,
        f"{train}/a/1",
        f"{train}/b/deep/er/2",
        f"{name}/b/3",
        f"{test}/a/4",
    )
    source = list_source(tmp_path)
    assert source.splits == {
        "train": [(f"{train}/a/1", 0), (f"{train}/b/deep/er/2", 1)],
        "validation": [(f"{name}/b/3", 1)],
    }
    assert source.validation == f"{name}/; test is left out, prepare and evaluate take --split test"
    tested = list_source(tmp_path, split="test")
    assert tested.splits == {"test": [(f"{test}/a/4", 0)]}
    with pytest.raises(UserError, match="share=0.5: .* has a validation split already"):
        list_source(tmp_path, validation_share=0.5)


def test_a_class_behind_a_broken_link_is_refused(tmp_path):
    fill(tmp_path, TRAIN)
    (tmp_path / "train/c").symlink_to("gone")
    with pytest.raises(UserError, match="train/c: a link to gone, which is not there; mend or rem"):
        list_source(tmp_path)


def test_samples_of_one_name_are_all_there(tmp_path):
    members = {
        "0.bmp": b"another",
        "0.mask.jpg": b"",
        "0.gif": b"",
        "0.jpg": b"",
        "0.cls": b"0",
        "1.TIFF": b"",
        "1.cls": b"1",
        "2.gif": b"",
        "2.cls": b"2",
    }
    train = ["Training/0.tar", "train_test/train-1.tar"]
    validation = ["val0/0.tar"]
    fill(tmp_path, dict.fromkeys(train + validation, tar_of(members)))
    fill_empty(tmp_path, "testing-0.tar")
    source = list_source(tmp_path)
    assert source.splits == {
        "train": listed_in(train),
        "validation": listed_in(validation),
    }
    before = source.fingerprint
    os.utime(tmp_path / "Training/0.tar", (0, 0))
    assert source.fingerprint != before


def listed_in(tars: list[str]) -> list[tuple[str, int]]:
    """Return what is listed of the archives: the image of each sample, with its label."""
    images = []
    for tar in tars:
        images.append((f"{tar}/0/0.jpg", 0))
        images.append((f"{tar}/1/1.TIFF", 1))
        # A kind that is not read is listed all the same, so that it is refused and counted.
        images.append((f"{tar}/2/2.gif", 2))
    return images


def test_rows_of_large_parquet_sources_are_shuffled_in_windows_of_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "IMAGES_PER_WINDOW", 12)
    rows = parquet_of([("a.jpg", b"1", number % 2) for number in range(40)])
    names = "\ufeffcat\ndog".encode()
    fill(tmp_path, {"t.parquet": rows, "labels.txt": names})
    source = list_source(tmp_path, validation_share=0)
    assert source.class_names == ["cat", "dog"]
    order = list(chain(*prepare.plan_shards(source, 5).values()))
    assert sorted(order) == sorted(source.splits["train"])
    first = [name for name, _ in order[:3]]
    assert first == ["t.parquet/10/a.jpg", "t.parquet/26/a.jpg", "t.parquet/6/a.jpg"]
    groups_of_windows = []
    for start in (0, 12, 24, 36):
        window = order[start : start + 12]
        groups = {source.positions[name].row_group for name, _ in window}
        groups_of_windows.append(len(groups))
    assert groups_of_windows == [3, 3, 3, 1]


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
