"""Prepared data sets that the tests of this folder share."""

import shutil
from pathlib import Path

import pytest

from common.shards.prepare import prepare
from imagenet_dali.testing import prepare_data, write_images


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 training images in three shards, 60 validation images, two classes; do not change it."""
    folder = tmp_path_factory.mktemp("prepared")
    for split, per_class in (("train", 120), ("val", 30)):
        write_images(folder / "images" / split, per_class)
    prepare(folder / "images", folder / "data", shards=3)
    return folder / "data"


@pytest.fixture
def data(prepared: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(prepared, tmp_path / "data")


@pytest.fixture(scope="session")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """53 training and 12 validation images of three colours, as shards; not to be changed."""
    return prepare_data(tmp_path_factory.mktemp("colours"))
