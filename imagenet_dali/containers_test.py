"""Tars and parquet files of the same images make the same data set as folders; damaged ones are refused by name."""

import importlib
import io
import json
import sys
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from common.errors import UserError
from common.testing.commands import read_folder, run_forked
from imagenet_dali import preparation
from imagenet_dali.prepare import main, prepare
from imagenet_dali.sources import list_source, read_images
from imagenet_dali.tar_source import Place, Places
from imagenet_dali.testing import jpeg, write_photographs
from imagenet_dali.writer import Options

CLASSES = ["n01", "n02", "n03"]
WORDS = ["tench, Tinca tinca", "goldfish", "great white shark"]


def tar_of(members: dict[str, bytes], path: Path | None = None, mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(buffer.getvalue())
    return buffer.getvalue()


def write_parquet(path: Path, rows: list[tuple[str | None, bytes | None, int | None]], names: list[str]) -> None:
    """Write what the datasets library writes for images and class labels, four rows to a row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    columns = {"image": [dict(bytes=data, path=name) for name, data, _ in rows], "label": [row[2] for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("image", image), ("label", pa.int64())], metadata)
    pq.write_table(pa.table(columns, schema), path, row_group_size=4)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A folder for each kind of source of the same 30 training and 6 validation images, and ``folder`` prepared."""
    root = tmp_path_factory.mktemp("sources")
    folder = write_photographs(root / "folder" / "train", CLASSES, 10).parent
    (folder / "imagenet_metadata.txt").write_text("".join(f"{a}\t{b}\n" for a, b in zip(CLASSES, WORDS, strict=True)))
    labels = [2, 0, 1, 1, 0, 2]
    (folder / "imagenet_2012_validation_synset_labels.txt").write_text("\n".join(CLASSES[label] for label in labels))
    (folder / "val").mkdir()
    for number in range(6):
        (folder / "val" / f"v_{number}.JPEG").write_bytes(jpeg(50, 60, number))
    files = read_folder(folder)
    train = [(name, files[name], CLASSES.index(name[6:9])) for name in sorted(files) if name.startswith("train/")]
    val = [(name, files[name], labels[int(name[6])]) for name in sorted(files) if name.startswith("val/")]

    classes = {f"{name}.tar": tar_of({n[10:]: data for n, data, _ in train if name in n}) for name in CLASSES}
    tar_of(classes, root / "imagenet" / "ILSVRC2012_img_train.tar")
    tar_of({name[4:]: data for name, data, _ in val}, root / "imagenet" / "ILSVRC2012_img_val.tar")
    kinds = [("ILSVRC2012_ID", "i4"), ("WNID", "O"), ("words", "O"), ("num_children", "i4")]
    synsets = [(7, "n02", WORDS[1], 0), (8, "n01", WORDS[0], 0), (9, "n03", WORDS[2], 0), (10, "n00", "fish", 3)]
    savemat(mat := io.BytesIO(), {"synsets": np.array(synsets, kinds)[:, None]})
    truth = "".join(f"{[8, 7, 9][label]}\n" for label in labels).encode()
    devkit = {"kit/data/meta.mat": mat.getvalue(), "kit/data/ILSVRC2012_validation_ground_truth.txt": truth}
    tar_of(devkit, root / "imagenet" / "ILSVRC2012_devkit_t12.tar.gz", "w:gz")

    for number, rows in enumerate((train[::2], train[1::2], val)):
        split = ("train", "train", "validation")[number]
        as_cls = {n.replace(".jpg", ".cls").replace(".JPEG", ".cls"): str(label).encode() for n, _, label in rows[::2]}
        as_json = {f"{n.split('.')[0]}.json": json.dumps({"label": label}).encode() for n, _, label in rows[1::2]}
        members = sorted(({name: data for name, data, _ in rows} | as_cls | as_json).items())
        tar_of(dict(members), root / "webdataset" / f"{split}-{number}.tar")
        write_parquet(root / "parquet" / "data" / f"{split}-0000{number}-of-00002.parquet", rows, WORDS)
    (root / "webdataset" / "labels.txt").write_text("".join(f"{name}\n" for name in WORDS))
    prepare(folder, root / "prepared", Options(shards=3))
    return root


def content(dest: Path) -> dict[str, bytes]:
    return {name: data for name, data in read_folder(dest).items() if name != "manifest.json"}


@pytest.mark.parametrize("kind", ["imagenet", "webdataset", "parquet"])
def test_every_source_of_the_same_images_makes_the_same_data_set(sources, tmp_path, kind):
    prepare(sources / kind, tmp_path / "data", Options(shards=3))
    assert content(tmp_path / "data") == content(sources / "prepared")
    state = read_folder(tmp_path / "data")
    prepare(sources / kind, tmp_path / "data", Options(shards=3))
    assert read_folder(tmp_path / "data") == state


def test_a_truncated_tar_is_refused_wherever_it_ends(sources, tmp_path):
    whole = (sources / "webdataset" / "train-0.tar").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        last = tar.getmembers()[-1]
    path = tmp_path / "train-0.tar"
    damaged = whole[: last.offset] + b"x" + whole[last.offset + 1 :]
    for data in (whole[: last.offset], whole[: last.offset + 9], whole[: last.offset_data + 1], damaged, b""):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"train-0.tar: truncated or damaged at (its first member|train/n0\d/\d)"):
            list_source(tmp_path)
    ended = run_forked(main, [str(tmp_path), str(tmp_path / "data"), "--workers=1"])
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
    outer = tar_of({"n01.tar": tar_of({"1.jpg": bytes(9)})[:1024], "n02.tar": tar_of({"2.jpg": bytes(9)})})
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(outer)
    with pytest.raises(UserError, match="img_train.tar: truncated or damaged at n02.tar"):
        list_source(tmp_path)


def test_places_take_few_bytes_and_equal_those_of_a_dict():
    names = [f"{number:07d}.jpg" for number in np.random.default_rng(0).permutation(20_000)]
    spans = np.stack([np.arange(20_000), np.arange(20_000) + (1 << 40)], 1)
    tracemalloc.start()
    places = Places([("b.tar", names[:15_000], spans[:15_000]), ("a.tar", names[15_000:], spans[15_000:])])
    assert tracemalloc.get_traced_memory()[0] < 32 * len(names)
    tracemalloc.stop()
    containers = ["b.tar"] * 15_000 + ["a.tar"] * 5_000
    assert places == {
        name: Place(container, *span) for name, container, span in zip(names, containers, spans.tolist(), strict=True)
    }
    assert places.get("8.jpg") is None
    assert Places().get("8.jpg") is None


@pytest.mark.parametrize("name", ["train-0.tar.gz", "train-0.tgz", "train-0.tar"])
def test_compressed_tars_are_refused(tmp_path, name):
    tar_of({"1.jpg": jpeg(), "1.cls": b"1"}, tmp_path / name, "w:gz")
    with pytest.raises(UserError, match=f"{name}: compressed, .* run gunzip on it first"):
        list_source(tmp_path)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.jpg": b"1"}, "t.tar: a.jpg: no label"),
        ({"a.jpg": b"1", "a.json": b'{"text": "cat"}'}, "t.tar: a.jpg: no label"),
        ({"a.jpg": b"1", "a.cls": b"cat"}, "t.tar: a.cls: label 'cat' is no class number"),
        ({"a.jpg": b"1", "a.json": b'{"label": "cat"}'}, "t.tar: a.json: label 'cat' is no class number"),
        ({"a.jpg": b"1", "a.json": b"[" * 100_000}, "t.tar: a.json: label .* is no class number"),
        ({"a.jpg": b"1", "a.cls": b"2"}, "t.tar: a.jpg: label 2, out of range for 2 classes"),
        ({"a.jpg": b"1", "a.cls": b"-1"}, "t.tar: a.jpg: label -1, out of range"),
        ({"a.txt": b"1"}, "no labelled images .* in t.tar"),
    ],
)
def test_samples_without_a_right_label_are_refused(tmp_path, members, message):
    tar_of(members, tmp_path / "t.tar")
    (tmp_path / "labels.txt").write_text("cat\ndog\n\n")
    with pytest.raises(UserError, match=message):
        list_source(tmp_path)


def test_tars_whose_samples_are_numbered_alike_need_no_class_names(tmp_path):
    samples = {f"{i}.{suffix}": data for i in range(9) for suffix, data in (("jpg", b"1"), ("cls", b"%d" % (i % 3)))}
    for name in ("train/0.tar", "train/1.tar", "val/0.tar"):
        tar_of(samples, tmp_path / name)
    source = list_source(tmp_path)
    assert source.class_names == ["0", "1", "2"]
    assert {split: len(set(files)) for split, files in source.splits.items()} == {"train": 18, "validation": 9}
    assert ("train/1.tar/5/5.jpg", 2) in source.splits["train"]
    tar_of({"1.jpg": b"1", "1.cls": b"5"}, tmp_path / "train" / "2.tar")
    with pytest.raises(UserError, match="labels to 5 without 3; name all classes in .*labels.txt"):
        list_source(tmp_path)


def test_rows_whose_files_have_the_same_name_are_all_there(tmp_path):
    write_parquet(tmp_path / "t.parquet", [("a.jpg", b"%d" % i, i % 2) for i in range(6)], ["cat", "dog"])
    source = list_source(tmp_path, validation_share=0)
    files = source.splits["train"]
    reads = read_images(tmp_path, files, [source.places[name] for name, _ in files])
    images = sorted((read(), label) for (_, label), read in zip(files, reads, strict=True))
    assert images == [(b"%d" % i, i % 2) for i in range(6)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("a.jpg", b"1", None)], "t.parquet: a.jpg: row 0 has no label"),
        ([("a.jpg", b"1", 0), (None, b"1", 2)], "t.parquet: t.parquet/1: label 2, out of range for 2 classes"),
        ([("a.jpg", b"1", -1)], "t.parquet: a.jpg: label -1, out of range"),
    ],
)
def test_rows_without_a_right_label_are_refused(tmp_path, rows, message):
    write_parquet(tmp_path / "t.parquet", rows, ["cat", "dog"])
    with pytest.raises(UserError, match=message):
        list_source(tmp_path)


def test_parquet_files_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    rows = [(None, data, number % 2) for number, data in enumerate([*(jpeg(seed=i) for i in range(150)), None])]
    write_parquet(path, rows, ["cat", "dog"])
    prepare(tmp_path, tmp_path.with_name("data"), Options(validation_share=0))
    assert tmp_path.with_name("data").joinpath("refused.txt").read_text() == "t.parquet/150\tempty file\n"
    importlib.import_module("pyarrow.parquet").write_table(
        importlib.import_module("pyarrow").table({"text": ["a"]}), path
    )
    with pytest.raises(UserError, match="t.parquet: columns text; a struct with the field bytes"):
        list_source(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match="t.parquet: .*; download it again"):
        list_source(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="pip install pyarrow"):
        list_source(tmp_path)


def test_rows_of_large_parquet_sources_are_shuffled_in_windows_of_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "IMAGES_PER_WINDOW", 12)
    write_parquet(tmp_path / "t.parquet", [(f"{i:02d}", b"1", i % 2) for i in range(40)], ["cat", "dog"])
    source = list_source(tmp_path, validation_share=0)
    order = [file for files in preparation.plan_shards(source, 5, seed=0).values() for file in files]
    assert sorted(order) == sorted(source.splits["train"])
    windows = [{source.places[name].start for name, _ in order[i : i + 12]} for i in range(0, 40, 12)]
    assert [len(groups) for groups in windows] == [3, 3, 3, 1]
    assert sorted(order[:12]) != order[:12]


def test_imagenet_21k_p_is_read_from_its_folders(tmp_path):
    for split in ("train", "val"):
        write_photographs(tmp_path / f"imagenet21k_{split}", CLASSES, 2)
    source = list_source(tmp_path)
    assert source.class_names == CLASSES
    assert {split: len(files) for split, files in source.splits.items()} == {"train": 6, "validation": 6}
