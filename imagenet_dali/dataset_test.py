"""What `open_split` and `Split.read` refuse, each with the file and the remedy in one line."""

import hashlib
import json
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from imagenet_dali.dataset import open_split
from imagenet_dali.prepare import prepare
from imagenet_dali.prepare_test import tree, write_images
from imagenet_dali.repair import repair
from imagenet_dali.verify import check
from imagenet_dali.writer import Options

FIRST = "train-00000-of-00002"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(write_images(folder / "images", 10), folder / "data", Options(shards=2))
    return folder / "data"


@pytest.fixture
def data(prepared, tmp_path) -> Path:
    return shutil.copytree(prepared, tmp_path / "data")


def edit_manifest(root: Path, change) -> None:
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def edit_table(root: Path, change) -> None:
    """Change the record table and enter its new checksum into the manifest."""
    path = root / "records" / "train.npy"
    np.save(path, change(np.load(path)))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edit_manifest(root, lambda manifest: manifest["splits"]["train"].update(records_sha256=digest))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def drop_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def swap_indexes(root: Path) -> None:
    first, second = sorted((root / "idx_files" / "train").iterdir())
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


FAULTS = {
    "missing shard": (lambda root: (root / "train" / FIRST).unlink(), f"{FIRST}: missing"),
    "truncated shard": (lambda root: truncate(root / "train" / FIRST), f"{FIRST}: .* bytes, not .* as in the manifest"),
    "missing index": (lambda root: (root / "idx_files/train" / f"{FIRST}.idx").unlink(), r"idx: missing, .* no index"),
    "missing indexes": (lambda root: shutil.rmtree(root / "idx_files"), r"idx: missing, the shard has no index"),
    "short index": (lambda root: drop_line(root / "idx_files/train" / f"{FIRST}.idx"), "7 lines for 8 records"),
    "index of another shard": (swap_indexes, "idx: does not fit its shard"),
    "missing table": (lambda root: (root / "records/train.npy").unlink(), "train.npy: missing"),
    "changed table": (lambda root: truncate(root / "records/train.npy"), "train.npy: differs from the manifest"),
    "short table": (lambda root: edit_table(root, lambda rows: rows[:-1]), "15 rows, not 16 in 2 shards"),
    "missing labels": (lambda root: (root / "labels.txt").unlink(), "labels.txt: missing or not 2 lines"),
    "short labels": (lambda root: drop_line(root / "labels.txt"), "labels.txt: missing or not 2 lines"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_files_that_do_not_fit_the_manifest_are_refused(data, name):
    corrupt, message = FAULTS[name]
    corrupt(data)
    with pytest.raises(UserError, match=message) as caught:
        open_split(data, "train")
    copy_back = "missing shard" in name or "labels" in name
    assert ("copy it from where" if copy_back else f"prepare --check --repair {data}") in str(caught.value)
    assert "\n" not in str(caught.value)


class Evil:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mknod, (str(self.path),)


@pytest.mark.parametrize("kind", ["numbers", "pickled objects"])
def test_a_table_of_something_else_is_refused_and_not_run(data, tmp_path, kind):
    table = np.zeros(16) if kind == "numbers" else np.array([Evil(tmp_path / "made")], object)
    edit_table(data, lambda rows: table)
    with pytest.raises(UserError, match="train.npy: not a table of records; run"):
        open_split(data, "train")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "train/../../evil"])
@pytest.mark.parametrize("of", ["split", "shard"])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(data, name, of):
    def lead_out(manifest):
        if of == "split":
            manifest["splits"][name] = manifest["splits"]["validation"]
        else:
            manifest["splits"]["train"]["shards"][0]["name"] = name

    edit_manifest(data, lead_out)
    before = tree(data.parent)
    for call in (lambda: open_split(data, "train"), lambda: repair(data, 1), lambda: check(data, 1)):
        with pytest.raises(UserError, match="manifest.json: not a manifest"):
            call()
    assert tree(data.parent) == before


def test_labels_out_of_range_are_refused(data):
    def raise_label(rows):
        rows["label"][3] = 2
        return rows

    edit_table(data, raise_label)
    with pytest.raises(UserError, match="labels 0 to 2, out of range for 2 classes"):
        open_split(data, "train")


def test_folders_that_are_no_data_set_say_what_to_do(data, tmp_path):
    with pytest.raises(UserError, match="nowhere: no such folder"):
        open_split(tmp_path / "nowhere", "train")
    with pytest.raises(UserError, match="prepare SOURCE DEST"):
        open_split(tmp_path, "train")
    shutil.rmtree(data / "validation")
    edit_manifest(data, lambda manifest: manifest["splits"].pop("validation"))
    with pytest.raises(UserError, match="no validation split, only train"):
        open_split(data, "validation")
    edit_manifest(data, lambda manifest: manifest.update(format=2))
    with pytest.raises(UserError, match="format 2, not 1"):
        open_split(data, "train")
    (data / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="not a manifest"):
        open_split(data, "train")
    (data / "manifest.json").unlink()
    with pytest.raises(UserError, match=f"--adopt {data}"):
        open_split(data, "train")
    (data / ".partial").mkdir()
    with pytest.raises(UserError, match="preparation was stopped; rerun the command"):
        open_split(data, "train")
    with pytest.raises(UserError, match="prepare SOURCE DEST"):
        open_split(write_images(tmp_path / "images" / "train", 1).parent, "train")


def test_a_record_that_went_bad_is_named(data):
    split = open_split(data, "train")
    row = split.records[3]
    path = split.shards[row["shard"]]
    content = bytearray(path.read_bytes())
    content[row["offset"] + row["image_start"] + row["image_size"] // 2] ^= 1
    path.write_bytes(content)
    split = open_split(data, "train")  # sizes and tables are right: only reading the record can tell
    split.read(2)
    place = f"{path}: record 3 of train at byte {row['offset']}: checksum of the data does not match; run `python -m"
    with pytest.raises(UserError, match=place):
        split.read(3)
    truncate(split.shards[1])
    with pytest.raises(UserError, match="length field says"):
        split.read(len(split) - 1)
    split.shards[1].unlink()
    with pytest.raises(UserError, match="No such file"):
        split.read(len(split) - 1)


def test_threads_and_other_processes_read_the_same(prepared):
    split = open_split(prepared, "train")
    expected = [split.read(index) for index in range(len(split))]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(split.read, list(range(len(split))) * 10)) == expected * 10
    copy = pickle.loads(pickle.dumps(split))
    assert [copy.read(index) for index in range(len(split))] == expected


def test_the_fingerprint_follows_the_content_and_not_the_place(prepared, data, tmp_path):
    train = open_split(prepared, "train").fingerprint
    assert tree(prepared) == tree(data)
    assert open_split(data, "train").fingerprint == train
    assert open_split(data, "validation").fingerprint != train
    prepare(write_images(tmp_path / "images", 10), tmp_path / "other", Options(shards=2, seed=1))
    assert open_split(tmp_path / "other", "train").fingerprint != train
