"""What `open_split` and `Split.read` refuse, each with the file and the remedy in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import UserError
from common.shards.dataset import open_split
from imagenet_dali.testing import prepare_data

FIRST = "train/train-00000-of-00003"


def edit_manifest(root: Path, change: Callable[[dict], object]) -> None:
    manifest = json.loads((root / "manifest.json").read_text())
    change(manifest)
    (root / "manifest.json").write_text(json.dumps(manifest))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


FAULTS: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda root: truncate(root / FIRST),
        rf"{FIRST}: \d+ bytes, not \d+ as in the manifest; copy the data set again",
    ),
    (
        lambda root: (root / "labels.txt").write_text("class_0\n"),
        "labels.txt: 1 names, not 2 as in the manifest; copy",
    ),
    (
        lambda root: (root / "labels.txt").write_bytes(b"caf\xe9"),
        r"labels.txt: not UTF-8 text \(byte 3\)",
    ),
    (lambda root: edit_manifest(root, lambda of: of.update(format=2)), "format: Input should be 1"),
    (
        lambda root: edit_manifest(root, lambda of: of["splits"].pop("train")),
        "no train split, only val",
    ),
    (lambda root: root.rename(root.with_name("elsewhere")), "no such folder"),
]


@pytest.mark.parametrize(("corrupt", "message"), FAULTS)
def test_files_that_do_not_fit_the_manifest_are_refused(data, corrupt, message):
    corrupt(data)
    with pytest.raises(UserError, match=message):
        open_split(data, "train")


def test_the_fingerprint_is_of_every_shard(data):
    before = open_split(data, "validation").fingerprint
    edit_manifest(data, lambda of: of["splits"]["validation"]["shards"][-1].update(sha256="other"))
    assert open_split(data, "validation").fingerprint != before


def test_an_image_is_named_by_its_file_and_its_record(tmp_path):
    split = open_split(prepare_data(tmp_path), "train")
    name, place = split.name_image(3).split(", ")
    assert (tmp_path / "images" / name).is_file()
    assert split.read(3)[0] == (tmp_path / "images" / name).read_bytes()
    assert place.startswith(f"{split.shards[0]}: record 3 of train at byte ")
