import hashlib
import io
import os
import pickle
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cifar10_benchmark import dataset
from cifar10_benchmark.dataset import ARCHIVE, BATCHES, open_images
from common.errors import UserError

PER_BATCH = 20
NOISE = np.random.default_rng(0)
NAMES = {split: list(files) for split, files in dataset.MD5_OF_BATCHES.items()}
PIXELS = {name: NOISE.integers(0, 256, (PER_BATCH, 3072), np.uint8) for names in NAMES.values() for name in names}
LABELS = {name: NOISE.integers(0, 10, PER_BATCH).tolist() for name in PIXELS}


def write_batches(root: Path, pixels: Mapping[str, np.ndarray]) -> Path:
    """Write a miniature of the unpacked archive, and let `dataset` take it for the whole."""
    (root / BATCHES).mkdir(parents=True, exist_ok=True)
    for split, names in NAMES.items():
        for name in names:
            content = pickle.dumps({b"batch_label": b"", b"labels": LABELS[name], b"data": pixels[name]}, 2)
            (root / BATCHES / name).write_bytes(content)
            dataset.MD5_OF_BATCHES[split][name] = hashlib.md5(content).hexdigest()
    return root


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(dataset, "MD5_OF_BATCHES", {"train": {}, "test": {}})
    return write_batches(tmp_path, PIXELS)


def open_at(root: Path):
    return open_images({"root": str(root), "download": False})


def check(images) -> None:
    train, test = images.load("train"), images.load("test")
    assert (images.count("train"), images.count("test"), images.num_classes) == (5 * PER_BATCH, PER_BATCH, 10)
    expected = np.concatenate([PIXELS[f"data_batch_{number}"] for number in range(1, 6)])
    np.testing.assert_array_equal(train.images.reshape(-1, 3072), expected)
    assert train.images.shape[1:] == (3, 32, 32)
    assert train.labels.tolist() == [label for number in range(1, 6) for label in LABELS[f"data_batch_{number}"]]
    assert test.labels.tolist() == LABELS["test_batch"]
    assert test.labels.dtype == np.int64


def test_the_fingerprint_of_batches_is_of_their_content(root, tmp_path):
    original = open_at(root).fingerprint
    shutil.copytree(root, tmp_path / "copy")
    assert open_at(tmp_path / "copy").fingerprint == original
    write_batches(tmp_path / "copy", PIXELS | {"test_batch": PIXELS["test_batch"] ^ 1})
    assert open_at(tmp_path / "copy").fingerprint != original


def test_reads_the_batches_and_their_archive(root, tmp_path, monkeypatch):
    check(open_at(root))
    new = tmp_path / "new"
    with pytest.raises(UserError, match="DATA.root=.* has no cifar-10-batches-py/.*--set DATA.download=True fetches"):
        open_at(new)
    new.mkdir()
    with tarfile.open(new / ARCHIVE, "w:gz") as tar:
        tar.add(root / BATCHES, BATCHES)
    monkeypatch.setattr(dataset, "MD5", hashlib.md5((new / ARCHIVE).read_bytes()).hexdigest())
    check(open_at(new))
    (new / ARCHIVE).unlink()
    check(open_at(new))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file or directory"), (b"", "MD5 differs"), (pickle.dumps(Evil()), "MD5 differs")],
)
def test_a_file_that_is_not_cifars_is_named_and_not_unpickled(root, content, words, monkeypatch):
    monkeypatch.chdir(root)
    path = root / BATCHES / "test_batch"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path}: .*{words}; remove {root / BATCHES} and unpack {ARCHIVE} again"):
        open_at(root).load("test")
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


def test_reads_a_folder_of_images(folder):
    images = open_at(folder)
    assert (images.count("train"), images.count("test"), images.num_classes) == (8, 6, 2)
    train = images.load("train")
    assert train.labels.tolist() == [0] * 3 + [1] * 5
    names = "cat/0.png cat/2.png cat/4.png dog/1.png dog/3.png dog/5.png dog/grey.png dog/photo.jpg"
    for row, name in enumerate(names.split()):
        pixels = np.asarray(Image.open(folder / "train" / name).convert("RGB"))
        np.testing.assert_array_equal(train.images[row], pixels.transpose(2, 0, 1), name)


def test_the_fingerprint_of_a_folder_is_of_its_files(folder, tmp_path_factory):
    original = open_at(folder).fingerprint
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("other") / "copy")
    assert open_at(copy).fingerprint == original
    (copy / "test" / "cat" / "0.png").rename(copy / "test" / "cat" / "6.png")
    assert open_at(copy).fingerprint != original


def _picture(size: tuple[int, int], kind: str = "png") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind)
    return file.getvalue()


def _bomb() -> bytes:
    content = bytearray(_picture((8, 8), "jpeg"))
    size = content.index(b"\xff\xc0") + 5
    content[size : size + 4] = b"\xff\x00" * 2
    return bytes(content)


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("train/cat/9.png", b"text", "train/cat/9.png: .*; remove or replace this image"),
        ("train/cat/9.jpg", b"\xff\xd8\xff\xe0", "train/cat/9.jpg: .*; remove or replace this image"),
        ("train/cat/9.jpg", _bomb(), "9.jpg: 65280x65280 is more than 100 million pixels; remove or replace"),
        ("train/cat/9.png", _picture((9, 8)), "9.png: 9 x 8 pixels, the first of .* has 8 x 8; make all images"),
        ("train/cat/0.png", _picture((9, 8)), "0.png: 9 x 8 pixels"),
        ("train/eel/1.png", _picture((8, 8)), "test/eel: test/ needs train's class folders"),
        ("test/eel/1.png", _picture((8, 8)), "test/eel: test/ needs train's class folders"),
    ],
)
def test_a_wrong_image_or_class_is_named(folder, path, content, words):
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_bytes(content)
    with pytest.raises(UserError, match=words):
        open_at(folder).load("train")


@pytest.mark.parametrize(
    ("classes", "words"), [(["eel", "fox"], "train/eel: no images"), ([], "train: 0 class folders")]
)
def test_empty_classes_and_none_are_named(tmp_path, classes, words):
    (tmp_path / "train").mkdir()
    for name in classes:
        for split in ("train", "test"):
            (tmp_path / split / name).mkdir(parents=True)
    with pytest.raises(UserError, match=words):
        open_at(tmp_path)
