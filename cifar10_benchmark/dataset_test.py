import hashlib
import io
import multiprocessing
import os
import pickle
import shutil
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from cifar10_benchmark import dataset
from cifar10_benchmark.dataset import ARCHIVE, BATCH_FILES, BATCHES, open_images
from common.errors import UserError

PER_BATCH = 20
NOISE = np.random.default_rng(0)
PIXELS = {name: NOISE.integers(0, 256, (PER_BATCH, 3072), np.uint8) for names in BATCH_FILES.values() for name in names}
LABELS = {name: NOISE.integers(0, 10, PER_BATCH).tolist() for name in PIXELS}


class Python2Pickler(pickle._Pickler):
    """Writes strings and numpy's module as Python 2 did, which wrote CIFAR-10's files."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_bytes(self, content: bytes) -> None:
        self.write(pickle.BINSTRING + len(content).to_bytes(4, "little") + content)
        self.memoize(content)

    def save_str(self, text: str) -> None:
        self.save_bytes(text.encode("latin1"))

    def save_global(self, thing: object, name: str | None = None) -> None:
        module = "numpy.core.multiarray" if thing.__name__ == "_reconstruct" else thing.__module__
        self.write(pickle.GLOBAL + f"{module}\n{thing.__name__}\n".encode())
        self.memoize(thing)

    dispatch[bytes], dispatch[str] = save_bytes, save_str


def write_batch(path: Path, content: object) -> None:
    with open(path, "wb") as file:
        Python2Pickler(file, 2).dump(content)


@pytest.fixture
def root(tmp_path) -> Path:
    """A data set as torchvision leaves it, in small."""
    (tmp_path / BATCHES).mkdir()
    for name, pixels in PIXELS.items():
        content = {b"batch_label": b"a batch", b"labels": LABELS[name], b"data": pixels, b"filenames": [b"x.png"]}
        write_batch(tmp_path / BATCHES / name, content)
    return tmp_path


@pytest.fixture
def archive(root, tmp_path_factory, monkeypatch) -> Path:
    """The archive of such a data set, and a server of its own that hands it out instead of the real one."""
    path = tmp_path_factory.mktemp("server") / ARCHIVE
    with tarfile.open(path, "w:gz") as tar:
        tar.add(root / BATCHES, BATCHES)
    monkeypatch.setattr(dataset, "MD5", hashlib.md5(path.read_bytes()).hexdigest())
    return path


def open_at(root: Path, download: bool = False):
    return open_images({"root": str(root), "download": download})


def check(images) -> None:
    train, test = images.load("train"), images.load("test")
    assert (images.count("train"), images.count("test"), images.num_classes) == (5 * PER_BATCH, PER_BATCH, 10)
    expected = np.concatenate([PIXELS[f"data_batch_{number}"] for number in range(1, 6)])
    np.testing.assert_array_equal(train.images.reshape(-1, 3072), expected)
    assert train.images.shape[1:] == (3, 32, 32)
    assert train.labels.tolist() == [label for number in range(1, 6) for label in LABELS[f"data_batch_{number}"]]
    assert test.labels.tolist() == LABELS["test_batch"]
    assert test.labels.dtype == np.int64


def test_reads_torchvisions_files(root):
    check(open_at(root))


def test_a_fingerprint_follows_the_content_of_the_batches(root, tmp_path):
    original = open_at(root).fingerprint
    shutil.copytree(root, tmp_path / "copy")
    assert open_at(tmp_path / "copy").fingerprint == original
    content = {b"labels": LABELS["test_batch"], b"data": PIXELS["test_batch"] ^ 1}
    write_batch(tmp_path / "copy" / BATCHES / "test_batch", content)
    assert open_at(tmp_path / "copy").fingerprint != original


def test_unpacks_the_archive(archive, tmp_path):
    root = tmp_path / "new"
    root.mkdir()
    (root / ARCHIVE).write_bytes(archive.read_bytes())
    check(open_at(root))
    (root / ARCHIVE).unlink()
    check(open_at(root))


def test_a_damaged_archive_is_named(archive, tmp_path):
    root = tmp_path / "new"
    root.mkdir()
    (root / ARCHIVE).write_bytes(archive.read_bytes()[:-9])
    with pytest.raises(UserError, match=f"{ARCHIVE}: MD5 .* is not .*; remove the file and download it again"):
        open_at(root)


def _open_and_check(root: Path, done) -> None:
    os.environ.pop("http_proxy", None)
    check(open_at(root, download=True))
    done.put(os.getpid())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_of_four_processes_one_downloads_and_all_read(archive, tmp_path, monkeypatch):
    requests = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, *_: object) -> None:
            requests.append(self.path)

    context = multiprocessing.get_context("fork")
    done = context.SimpleQueue()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=archive.parent)) as http:
        monkeypatch.setattr(dataset, "URL", f"http://127.0.0.1:{http.server_address[1]}/{ARCHIVE}")
        arguments = (tmp_path / "new" / "folder", done)
        processes = [context.Process(target=_open_and_check, args=arguments) for _ in range(4)]
        for process in processes:
            process.start()
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        for process in processes:
            process.join()
        http.shutdown()
        thread.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert requests == [f"/{ARCHIVE}"]


def test_nothing_is_downloaded_unasked(tmp_path):
    with pytest.raises(UserError, match="DATA.root=.* has no cifar-10-batches-py/.*--set DATA.download=True fetches"):
        open_at(tmp_path)
    assert list(tmp_path.iterdir()) == []


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps(Evil(), 2), "it asks for posix.system, which no array needs"),
        (pickle.dumps({b"data": getattr}, 4), "it asks for builtins.getattr, which no array needs"),
        (b"", "EOFError"),
        (pickle.dumps({b"other": 1}, 4), "KeyError"),
        (pickle.dumps(b"text")[:-3], "cifar-10-batches-py and unpack"),
    ],
)
def test_a_file_that_is_no_batch_is_named(root, content, words):
    path = root / BATCHES / "test_batch"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        open_at(root).load("test")
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "change",
    [{b"labels": [10] * PER_BATCH}, {b"labels": [1]}, {b"data": np.zeros((PER_BATCH, 3072), np.float32)}],
)
def test_a_batch_of_something_else_is_named(root, change):
    content = {b"labels": LABELS["test_batch"], b"data": PIXELS["test_batch"]}
    write_batch(root / BATCHES / "test_batch", content | change)
    with pytest.raises(UserError, match="test_batch: not a batch of CIFAR-10; remove"):
        open_at(root).load("test")


def test_a_missing_batch_is_named(root):
    (root / BATCHES / "data_batch_3").unlink()
    with pytest.raises(UserError, match="data_batch_3: No such file or directory; remove"):
        open_at(root).count("train")


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


def _picture(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("train/cat/9.png", b"text", "train/cat/9.png: .*; remove or replace this image"),
        ("train/cat/9.jpg", b"\xff\xd8\xff\xe0", "train/cat/9.jpg: .*; remove or replace this image"),
        ("train/cat/9.png", _picture((9, 8)), "9.png: 9 x 8 pixels, the first of .* has 8 x 8; make all images"),
        ("train/cat/0.png", _picture((9, 8)), "0.png: 9 x 8 pixels"),
        ("train/eel/1.png", _picture((8, 8)), "test/eel: split test needs train's class folders"),
        ("test/eel/1.png", _picture((8, 8)), "test/eel: split test needs train's class folders"),
    ],
)
def test_a_wrong_image_or_class_is_named(folder, path, content, words):
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_bytes(content)
    with pytest.raises(UserError, match=words):
        open_at(folder).load("train")


def test_a_bomb_is_not_decoded(folder):
    lying = bytearray((folder / "train" / "dog" / "photo.jpg").read_bytes())
    size = lying.index(b"\xff\xc0") + 5
    lying[size : size + 4] = b"\xff\x00" * 2
    (folder / "train" / "dog" / "photo.jpg").write_bytes(lying)
    with pytest.raises(UserError, match="photo.jpg: 65280x65280 is more than 100 million pixels; remove or replace"):
        open_at(folder).load("train")


def test_a_fingerprint_follows_paths_and_sizes(folder, tmp_path_factory):
    original = open_at(folder).fingerprint
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("other") / "copy")
    assert open_at(copy).fingerprint == original
    (copy / "test" / "cat" / "0.png").rename(copy / "test" / "cat" / "6.png")
    assert open_at(copy).fingerprint != original


def test_an_empty_class_is_named(folder):
    (folder / "train" / "eel").mkdir()
    (folder / "test" / "eel").mkdir()
    with pytest.raises(UserError, match="train/eel: no images"):
        open_at(folder)


def test_a_folder_without_classes_is_named(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="train: 0 class folders"):
        open_at(tmp_path)
