"""What `open_split` and `Split.read` refuse, each with the file and the remedy in one line."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from common.data.block_cache import BlockCache
from common.errors import UserError
from common.testing.commands import read_folder
from imagenet_dali.dataset import open_split
from imagenet_dali.repair import repair
from imagenet_dali.testing import spoil_record, write_images
from imagenet_dali.verify import check

FIRST = "train-00000-of-00003"


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


def raise_label(rows: np.ndarray) -> np.ndarray:
    rows["label"][3] = 2
    return rows


class Evil:
    """Unpickled, it would make a file."""

    def __reduce__(self):
        return os.mknod, ("made",)


FAULTS = {
    "missing shard": (lambda root: (root / "train" / FIRST).unlink(), f"{FIRST}: missing"),
    "large shard": (
        lambda root: os.truncate(root / "train" / FIRST, 1 << 42),
        f"{FIRST}: 4398046511104 bytes, not .* as in the manifest",
    ),
    "truncated shard": (
        lambda root: truncate(root / "train" / FIRST),
        f"{FIRST}: .*(bytes, not .* as in|cut off here: 1 record)",
    ),
    "missing table": (lambda root: (root / "records/train.npy").unlink(), "train.npy: missing"),
    "changed table": (lambda root: truncate(root / "records/train.npy"), "train.npy: differs from the manifest"),
    "short table": (lambda root: edit_table(root, lambda rows: rows[:-1]), "239 rows, not 240 in 3 shards"),
    "table of pickled objects": (
        lambda root: edit_table(root, lambda rows: np.array([Evil()], object)),
        "train.npy: not a table of records",
    ),
    "labels out of range": (
        lambda root: edit_table(root, raise_label),
        "train.npy: labels 0 to 2, out of range for 2 classes",
    ),
    "short labels": (lambda root: (root / "labels.txt").write_text("one\n"), "labels.txt: missing or not 2 lines"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_files_that_do_not_fit_the_manifest_are_refused(data, name, monkeypatch):
    corrupt, message = FAULTS[name]
    monkeypatch.chdir(data)
    corrupt(data)
    with pytest.raises(UserError, match=message) as caught:
        open_split(data, "train")
    copy_back = name in ("missing shard", "large shard", "short labels")
    assert ("copy it from where" if copy_back else f"prepare --check --repair {data}") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert any(re.search(message, fault) for fault in check(data, 1))
    assert not (data / "made").exists()


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "train/../../evil"])
@pytest.mark.parametrize("of", ["split", "shard"])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(data, name, of):
    def lead_out(manifest):
        if of == "split":
            manifest["splits"][name] = manifest["splits"]["validation"]
        else:
            manifest["splits"]["train"]["shards"][0]["name"] = name

    edit_manifest(data, lead_out)
    before = read_folder(data.parent)
    for call in (lambda: open_split(data, "train"), lambda: repair(data, 1), lambda: check(data, 1)):
        with pytest.raises(UserError, match="manifest.json: splits.*(evil|Input should be 'train')"):
            call()
    assert read_folder(data.parent) == before


def test_folders_that_are_no_data_set_say_what_to_do(data, tmp_path):
    def expect(message: str, root: Path = data, split: str = "train") -> None:
        with pytest.raises(UserError, match=message):
            open_split(root, split)

    expect("nowhere: no such folder", tmp_path / "nowhere")
    expect("prepare SOURCE DEST", tmp_path)
    shutil.rmtree(data / "validation")
    edit_manifest(data, lambda manifest: manifest["splits"].pop("validation"))
    expect("no validation split, only train", split="validation")
    edit_manifest(data, lambda manifest: manifest.update(format=2))
    expect("format: Input should be 1, not '2'")
    (data / "manifest.json").write_text("{")
    expect("manifest.json: Invalid JSON")
    (data / "manifest.json").unlink()
    expect(f"--adopt {data}")
    (data / ".partial").mkdir()
    expect("preparation was stopped; rerun the command")
    expect("prepare SOURCE DEST", write_images(tmp_path / "images" / "train", 1).parent)


def test_a_record_that_went_bad_is_named(data):
    path = spoil_record(data, "train", 3)
    split = open_split(data, "train")  # sizes and tables are right: only reading the record can tell
    split.read(2)
    place = f"{path}: record 3 of train at byte {split.records[3]['offset']}"
    with pytest.raises(UserError, match=f"{place}: checksum of the data does not match; run `python -m"):
        split.read(3)
    truncate(split.shards[2])
    with pytest.raises(UserError, match=f"{split.shards[2]}: record 239 .*: the shard is shorter than its index"):
        split.read(len(split) - 1)
    split.shards[2].unlink()
    with pytest.raises(UserError, match="No such file"):
        split.read(len(split) - 1)


def test_a_restored_shard_is_read_again_in_spite_of_the_cache(data, tmp_path):
    path = data / "train" / FIRST
    content = path.read_bytes()
    spoil_record(data, "train", 3)
    split = open_split(data, "train", BlockCache(tmp_path / "cache", 10**9))
    assert isinstance(split.read_span(0, 5)[3], UserError)
    path.write_bytes(content)
    records = split.read_span(0, 5)
    assert not any(isinstance(record, UserError) for record in records)
    path.unlink()
    assert split.read_span(0, 5) == records  # from the cache
