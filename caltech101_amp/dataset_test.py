"""Finding, unpacking and splitting the data set, on a miniature of it."""

import hashlib
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from caltech101_amp import dataset
from caltech101_amp.dataset import open_split
from caltech101_amp.testing import NAMES, PER_CATEGORY, expect_miniature, write_categories
from common.data.image_folder import FolderSplit
from common.errors import UserError


@pytest.fixture(autouse=True)
def miniature(monkeypatch):
    expect_miniature(monkeypatch)


@pytest.fixture(scope="module")
def categories(tmp_path_factory) -> Path:
    return write_categories(tmp_path_factory.mktemp("data") / dataset.FOLDER)


def data(root: Path, download: bool = False) -> dict:
    return {"root": str(root), "download": download}


def paths(split: FolderSplit) -> list[str]:
    return [split.path(index).relative_to(split.root).as_posix() for index in range(len(split))]


def test_a_fifth_of_each_category_is_for_testing(categories):
    train, test = (open_split(data(categories.parent), split) for split in ("train", "test"))
    assert (len(train), len(test)) == (48, 12)
    assert train.class_names == list(NAMES)
    for label, name in enumerate(NAMES):
        members = [path for path in paths(test) if path.startswith(name)]
        assert len(members) == 4
        assert test.read(paths(test).index(members[0]))[1] == label
    everything = {f"{name}/image_{number:04d}.jpg" for name in NAMES for number in range(PER_CATEGORY)}
    assert set(paths(train)) | set(paths(test)) == everything
    # the same in every version of this project
    assert paths(test)[:4] == [f"accordion/image_{number:04d}.jpg" for number in (4, 6, 11, 19)]
    assert len(open_split(data(categories), "train")) == 48  # the folder of categories itself is accepted too


def test_either_archive_is_unpacked(categories, tmp_path, monkeypatch):
    for name in ("tar", "zip"):
        (tmp_path / name).mkdir()
    tar_path, zip_path = tmp_path / "tar" / dataset.ARCHIVE, tmp_path / "zip" / dataset.OUTER_ARCHIVE
    with tarfile.open(tar_path, "w:gz") as tar:
        tar.add(categories, dataset.FOLDER)
    with zipfile.ZipFile(zip_path, "w") as container:
        container.write(tar_path, f"{dataset.OUTER_FOLDER}/{dataset.ARCHIVE}")
    monkeypatch.setattr(dataset, "MD5", hashlib.md5(zip_path.read_bytes()).hexdigest())
    for name in ("tar", "zip"):
        assert len(open_split(data(tmp_path / name), "train")) == 48
        assert (tmp_path / name / dataset.FOLDER / "cup" / "image_0003.jpg").is_file()


def test_a_missing_data_set_is_named_with_the_remedy(tmp_path):
    with pytest.raises(UserError, match="has no 101_ObjectCategories/, .*--set DATA.download=True fetches Caltech-101"):
        open_split(data(tmp_path), "train")


def test_a_partial_data_set_is_refused(categories, tmp_path):
    copy = shutil.copytree(categories, tmp_path / dataset.FOLDER)
    (copy / "cup" / "image_0000.jpg").unlink()
    with pytest.raises(UserError, match="101_ObjectCategories: 3 categories with 59 images, not 3 with 60; unpack"):
        open_split(data(tmp_path), "train")
    shutil.rmtree(copy / "cup")
    with pytest.raises(UserError, match="2 categories with 40 images, not 3 with 60"):
        open_split(data(tmp_path), "train")
