import hashlib
import pickle
import shutil
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

PER_BATCH = 20
NOISE = np.random.default_rng(0)
NAMES = ["data_batch_1", "test_batch"]
PIXELS = {name: NOISE.integers(0, 256, (PER_BATCH, 3072), np.uint8) for name in NAMES}
LABELS = {name: NOISE.integers(0, 2, PER_BATCH).tolist() for name in NAMES}


def open_at(root: Path) -> DataSet:
    dataset._open.cache_clear()
    return open_images({"root": str(root), "download": False})


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A miniature of the unpacked archive, which torchvision takes for the whole."""
    folder, sums = tmp_path / BATCHES, {}
    folder.mkdir()
    contents = {name: {"labels": LABELS[name], "data": PIXELS[name]} for name in NAMES}
    for name, content in (contents | {"batches.meta": {"label_names": ["cat", "dog"]}}).items():
        (folder / name).write_bytes(pickle.dumps(content))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(CIFAR10, "train_list", [(NAMES[0], sums[NAMES[0]])])
    monkeypatch.setattr(CIFAR10, "test_list", [(NAMES[1], sums[NAMES[1]])])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": sums["batches.meta"]})
    return tmp_path


def check(root: Path) -> None:
    images = open_at(root)
    assert images.class_names == ["cat", "dog"]
    for split, name in ((images.train, NAMES[0]), (images.test, NAMES[1])):
        np.testing.assert_array_equal(split.images, PIXELS[name].reshape(-1, 3, 32, 32))
        assert split.labels.tolist() == LABELS[name]


def test_reads_the_batches_and_their_archive(root, tmp_path, monkeypatch):
    check(root)
    new = tmp_path / "new"
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/")  # nobody listens there
    for download, words in (
        (False, "DATA.root=.* has no cifar-10-batches-py/.*DATA.download=True"),
        (True, "9/: "),
    ):
        with pytest.raises(UserError, match=words):
            open_images({"root": str(new), "download": download})
    with tarfile.open(new / CIFAR10.filename, "w:gz") as tar:
        tar.add(root / BATCHES, BATCHES)
    monkeypatch.setattr(
        CIFAR10, "tgz_md5", hashlib.md5((new / CIFAR10.filename).read_bytes()).hexdigest()
    )
    check(new)


def test_a_file_that_is_not_cifars_is_not_unpickled(root, monkeypatch):
    monkeypatch.chdir(root)
    (root / BATCHES / "test_batch").write_bytes(b"cos\nmkdir\n(S'evil'\ntR.")
    with pytest.raises(
        UserError,
        match=f"{root / BATCHES}: .* MD5 .*; remove it and unpack {CIFAR10.filename} again",
    ):
        open_at(root)
    assert not (root / "evil").exists()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three classes of images; two are grey, one of which has a damaged EXIF block."""
    for split in ("train", "test"):
        write_colours(tmp_path / split, 6, 8, 8)
    for name in ("grey.bmp", "grey.png"):
        Image.new("L", (8, 8), 99).save(tmp_path / "train" / "b" / name, exif=b"garbage!")
    return tmp_path


def test_reads_a_folder_of_images(folder, tmp_path_factory):
    images = open_at(folder)
    data = load_config("vit_lite_vanilla", [f"DATA.root={folder}"])["DATA"]
    assert describe_data(data) == DataSummary(
        8, 6, 3, images.fingerprint, ["b", "g", "r"], [4, 2, 2], validation="the test split"
    )
    assert images.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("other") / "copy")
    assert open_at(copy).fingerprint == images.fingerprint
    assert images._replace(train=images.test).fingerprint != images.fingerprint
    assert images._replace(test=images.train).fingerprint != images.fingerprint


@pytest.mark.parametrize(
    ("path", "width", "words"),
    [
        ("train/r/9.HEIC", 0, "train/r/9.HEIC: .*; remove or replace this image"),
        ("train/r/9.png", 9, "9.png: 9 x 8 pixels, the first of .* has 8 x 8; make all images"),
        ("test/eel/1.png", 8, "test/eel: this class has no training images"),
        ("train/eel/.hidden", 0, "train/eel: no images"),
    ],
)
def test_a_wrong_image_or_class_is_named(folder, path, width, words):
    (folder / path).parent.mkdir(exist_ok=True)
    if width:
        Image.new("RGB", (width, 8)).save(folder / path)
    else:
        (folder / path).write_bytes(b"no image")
    with pytest.raises(UserError, match=words):
        open_at(folder)
