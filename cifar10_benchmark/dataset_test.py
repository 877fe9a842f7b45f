import hashlib
import io
import os
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
from common.errors import UserError

PER_BATCH = 20
NOISE = np.random.default_rng(0)
NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
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
    monkeypatch.setattr(CIFAR10, "train_list", [(name, sums[name]) for name in NAMES[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [(NAMES[5], sums[NAMES[5]])])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": sums["batches.meta"]})
    return tmp_path


def check(root: Path) -> None:
    images = open_at(root)
    assert images.class_names == ["cat", "dog"]
    for split, names in ((images.train, NAMES[:5]), (images.test, NAMES[5:])):
        expected = np.concatenate([PIXELS[name] for name in names]).reshape(-1, 3, 32, 32)
        np.testing.assert_array_equal(split.images, expected)
        assert split.labels.tolist() == [label for name in names for label in LABELS[name]]
        assert split.labels.dtype == np.int64


def test_reads_the_batches_and_their_archive(root, tmp_path, monkeypatch):
    check(root)
    new = tmp_path / "new"
    with pytest.raises(UserError, match="DATA.root=.* has no cifar-10-batches-py/.*--set DATA.download=True fetches"):
        open_at(new)
    new.mkdir()
    with tarfile.open(new / CIFAR10.filename, "w:gz") as tar:
        tar.add(root / BATCHES, BATCHES)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5((new / CIFAR10.filename).read_bytes()).hexdigest())
    check(new)
    (new / CIFAR10.filename).unlink()
    check(new)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("content", [None, b"", pickle.dumps(Evil())])
def test_a_file_that_is_not_cifars_is_not_unpickled(root, content, monkeypatch):
    monkeypatch.chdir(root)
    path = root / BATCHES / "test_batch"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"{root / BATCHES}: .* MD5 .*; remove it and unpack {CIFAR10.filename} again"):
        open_at(root)
    assert not (root / "evil").exists()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two classes of lossless images; then one JPEG and one grey PNG."""
    for number in range(6):
        for split in ("train", "test"):
            path = tmp_path / split / ("cat", "dog")[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(NOISE.integers(0, 256, (8, 8, 3), np.uint8)).save(path)
    smooth = np.linspace(0, 255, 8).astype(np.uint8)[:, None].repeat(8, 1)
    Image.fromarray(smooth).save(tmp_path / "train" / "dog" / "grey.png")
    Image.fromarray(np.stack([smooth, smooth, smooth // 2], -1)).save(tmp_path / "train" / "dog" / "photo.jpg")
    return tmp_path


def test_reads_a_folder_of_images(folder, tmp_path_factory):
    images = open_at(folder)
    assert (images.class_names, len(images.test.labels)) == (["cat", "dog"], 6)
    assert images.train.labels.tolist() == [0] * 3 + [1] * 5
    names = "cat/0.png cat/2.png cat/4.png dog/1.png dog/3.png dog/5.png dog/grey.png dog/photo.jpg"
    for row, name in enumerate(names.split()):
        pixels = np.asarray(Image.open(folder / "train" / name).convert("RGB"))
        np.testing.assert_array_equal(images.train.images[row], pixels.transpose(2, 0, 1), name)
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("other") / "copy")
    assert open_at(copy).fingerprint == images.fingerprint
    (copy / "test" / "cat" / "0.png").rename(copy / "test" / "dog" / "0.png")
    assert open_at(copy).fingerprint != images.fingerprint


def _picture(size: tuple[int, int], kind: str = "png") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("train/cat/9.png", b"text", "train/cat/9.png: .*; remove or replace this image"),
        ("train/cat/9.jpg", b"\xff\xd8\xff\xe0", "train/cat/9.jpg: .*; remove or replace this image"),
        ("train/cat/9.png", _picture((9, 8)), "9.png: 9 x 8 pixels, the first of .* has 8 x 8; make all images"),
        ("train/cat/0.png", _picture((9, 8)), "0.png: 9 x 8 pixels"),
        ("test/eel/1.png", _picture((8, 8)), "test/eel: this class has no training images"),
        ("train/eel/.hidden", b"", "train/eel: no images"),
    ],
)
def test_a_wrong_image_or_class_is_named(folder, path, content, words):
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_bytes(content)
    with pytest.raises(UserError, match=words):
        open_at(folder)


def test_a_split_without_images_is_named(folder):
    shutil.rmtree(folder / "test")
    with pytest.raises(UserError, match="test: no images; they are expected as .*/test/<class>/"):
        open_at(folder)
