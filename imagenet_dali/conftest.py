"""A prepared data set that the tests of this folder share."""

import shutil
from pathlib import Path

import pytest

from imagenet_dali.prepare import prepare
from imagenet_dali.testing import write_images
from imagenet_dali.writer import Options


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 training images in three shards and 60 validation images in one, of two classes; not to be changed."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(write_images(folder / "images", 150), folder / "data", Options(shards=3))
    return folder / "data"


@pytest.fixture
def data(prepared: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(prepared, tmp_path / "data")


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``{train,val}/{ape,bee}/`` of 24 and 10 images, prepared in ``shards``; not to be changed."""
    folder = tmp_path_factory.mktemp("photographs")
    for split, per_class in (("train", 12), ("val", 5)):
        write_images(folder / "images" / split, per_class, ("ape", "bee"))
    prepare(folder / "images", folder / "shards")
    return folder
