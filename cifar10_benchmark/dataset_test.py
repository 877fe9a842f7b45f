import hashlib
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10

from cifar10_benchmark import dataset
from cifar10_benchmark.dataset import BATCHES, DataSet, open_images
from cifar10_benchmark.task import describe_data
from common.config.load import load_config
from common.config.plan import DataSummary
from common.errors import UserError
from common.testing.photographs import write_colours

NOISE = np.random.default_rng(0)
PIXELS = NOISE.integers(0, 256, (2, 20, 3072), np.uint8)  # train, then test
LABELS = NOISE.integers(0, 2, (2, 20)).tolist()


def open_at(root: Path) -> DataSet:
    dataset._open.cache_clear()
    return open_images({"root": str(root), "download": False})


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A miniature of the unpacked archive, which torchvision takes for the whole."""
    (tmp_path / BATCHES).mkdir()

    def write(name: str, **content: object) -> str:
        data = pickle.dumps(content)
        (tmp_path / BATCHES / name).write_bytes(data)
        return hashlib.md5(data).hexdigest()

    train = write("data_batch_1", data=PIXELS[0], labels=LABELS[0])
    test = write("test_batch", data=PIXELS[1], labels=LABELS[1])
    monkeypatch.setattr(CIFAR10, "train_list", [("data_batch_1", train)])
    monkeypatch.setattr(CIFAR10, "test_list", [("test_batch", test)])
    md5 = write("batches.meta", label_names=["cat", "dog"])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": md5})
    return tmp_path


def check(root: Path) -> None:
    images = open_at(root)
    assert images.class_names == ["cat", "dog"]
    train_pixels, test_pixels = PIXELS.reshape(2, 20, 3, 32, 32)
    np.testing.assert_array_equal(images.train.images, train_pixels)
    np.testing.assert_array_equal(images.test.images, test_pixels)
    train_labels, test_labels = LABELS
    assert images.train.labels.tolist() == train_labels
    assert images.test.labels.tolist() == test_labels


def test_reads_the_batches_and_their_archive(root, tmp_path, monkeypatch):
    check(root)
    new = tmp_path / "new"
    new.mkdir()
    words = "DATA.root=.* has no cifar-10-batches-py/.*DATA.download=True"
    with pytest.raises(UserError, match=words):
        open_at(new)
    archive = new / CIFAR10.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(root / BATCHES, BATCHES)
    md5 = hashlib.md5(archive.read_bytes())
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5.hexdigest())
    check(new)


def test_a_file_that_is_not_cifars_is_not_unpickled(root, monkeypatch):
    monkeypatch.chdir(root)
    (root / BATCHES / "test_batch").write_bytes(b"cos\nmkdir\n(S'evil'\ntR.")
    remedy = f"remove it and unpack {CIFAR10.filename} again"
    with pytest.raises(UserError, match=f"{root / BATCHES}: .* MD5 .*; {remedy}"):
        open_at(root)
    assert not (root / "evil").exists()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three classes of images; two are grey, one of which has a damaged EXIF block."""
    for split in ("train", "test"):
        write_colours(tmp_path / split, 6, height=8, width=8)
    grey = Image.new("L", (8, 8), 99)
    for name in ("grey.bmp", "grey.png"):
        grey.save(tmp_path / "train" / "b" / name, exif=b"garbage!")
    return tmp_path


@pytest.fixture(params=[1000, 3])
def part(request, monkeypatch):
    """Images that a process decodes at a time: all of the test's, or a part."""
    monkeypatch.setattr(dataset, "PART", request.param)


def test_other_processes_decode_a_large_folder(folder, monkeypatch):
    monkeypatch.setattr(dataset, "PART", 3)
    monkeypatch.setattr(dataset, "rank_cores", lambda: 2)
    main = os.getpid()

    def load_image(split, index):
        """Return an image that is white if this process has made it."""
        colour = 255 if os.getpid() == main else 0
        return np.full((8, 8, 3), colour, np.uint8), 0

    monkeypatch.setattr(dataset, "load_image", load_image)
    images = open_at(folder)
    assert not images.train.images.any()


@pytest.mark.usefixtures("part")
def test_reads_a_folder_of_images(folder):
    images = open_at(folder)
    data = load_config("vit_lite_vanilla", [f"DATA.root={folder}"])["DATA"]
    assert describe_data(data) == DataSummary(
        8,
        6,
        3,
        images.fingerprint,
        ["b", "g", "r"],
        [4, 2, 2],
        validation="the test split",
    )
    assert images.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert images._replace(train=images.test).fingerprint != images.fingerprint
    assert images._replace(test=images.train).fingerprint != images.fingerprint


@pytest.mark.parametrize(
    ("path", "width", "words"),
    [
        ("train/r/9.HEIC", 0, "train/r/9.HEIC: .*; remove or replace this image"),
        ("train/r/9.png", 9, "9.png: 9 x 8 pixels, the first of .* has 8 x 8; make all images"),
    ],
)
@pytest.mark.usefixtures("part")
def test_a_wrong_image_is_named(folder, path, width, words):
    if width:
        Image.new("RGB", (width, 8)).save(folder / path)
    else:
        (folder / path).write_bytes(b"no image")
    with pytest.raises(UserError, match=words):
        open_at(folder)
