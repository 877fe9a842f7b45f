"""Finding, fetching, splitting and checking the data set, on a miniature of it."""

import hashlib
import multiprocessing
import os
import shutil
import tarfile
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
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
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def categories(tmp_path_factory) -> Path:
    return write_categories(tmp_path_factory.mktemp("data") / dataset.FOLDER)


@pytest.fixture
def copy(categories, tmp_path) -> Path:
    return shutil.copytree(categories, tmp_path / dataset.FOLDER)


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


def test_the_split_stays_as_it_is(categories):
    assert paths(open_split(data(categories.parent), "test"))[:4] == [
        f"accordion/image_{number:04d}.jpg" for number in (4, 6, 11, 19)
    ]


def test_the_folder_of_categories_itself_will_do(categories):
    assert len(open_split(data(categories), "train")) == 48


def write_tar(categories: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / dataset.ARCHIVE, "w:gz") as tar:
        tar.add(categories, dataset.FOLDER)
    return folder / dataset.ARCHIVE


def write_zip(categories: Path, folder: Path) -> Path:
    tar = write_tar(categories, folder)
    with zipfile.ZipFile(folder / dataset.OUTER_ARCHIVE, "w") as container:
        container.write(tar, f"{dataset.OUTER_FOLDER}/{dataset.ARCHIVE}")
    tar.unlink()
    return folder / dataset.OUTER_ARCHIVE


def test_either_archive_is_unpacked(categories, tmp_path, monkeypatch):
    write_tar(categories, tmp_path / "tar")
    archive = write_zip(categories, tmp_path / "zip")
    monkeypatch.setattr(dataset, "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    for name in ("tar", "zip"):
        assert len(open_split(data(tmp_path / name), "train")) == 48
        assert (tmp_path / name / dataset.FOLDER / "cup" / "image_0003.jpg").is_file()


def test_four_processes_download_once(categories, tmp_path, monkeypatch):
    archive = write_zip(categories, tmp_path / "served")
    monkeypatch.setattr(dataset, "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    requests = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            requests.append(args)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=archive.parent)) as server:
        monkeypatch.setattr(dataset, "URL", f"http://127.0.0.1:{server.server_address[1]}/{archive.name}")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        context = multiprocessing.get_context("fork")
        counts = context.SimpleQueue()
        processes = [context.Process(target=_count, args=(tmp_path / "data", counts)) for _ in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        server.shutdown()
    assert [counts.get() for process in processes] == [48] * 4
    assert len(requests) == 1


def _count(root: Path, counts: multiprocessing.SimpleQueue) -> None:
    counts.put(len(open_split(data(root, download=True), "train")))


def test_a_missing_data_set_is_named_with_the_remedy(tmp_path):
    with pytest.raises(UserError, match="has no 101_ObjectCategories/, .*--set DATA.download=True fetches Caltech-101"):
        open_split(data(tmp_path), "train")


def test_a_partial_data_set_is_refused(copy):
    (copy / "cup" / "image_0000.jpg").unlink()
    with pytest.raises(UserError, match="101_ObjectCategories: 3 categories with 59 images, not 3 with 60; unpack"):
        open_split(data(copy.parent), "train")
    shutil.rmtree(copy / "cup")
    with pytest.raises(UserError, match="2 categories with 40 images, not 3 with 60"):
        open_split(data(copy.parent), "train")


def corrupt(folder: Path, count: int) -> None:
    for number in range(count):
        path = folder / "bass" / f"image_{number:04d}.jpg"
        path.write_bytes(path.read_bytes()[:200])


def test_a_corrupt_image_is_named_and_left_out(copy, monkeypatch, capsys):
    expected = [path for split in ("train", "test") for path in paths(open_split(data(copy.parent), split))]
    corrupt(copy, 1)
    monkeypatch.setattr("caltech101_amp.corrupt_images.MAX_BAD_SHARE", 0.02)
    for _ in range(2):  # found, and then remembered
        dataset._open.cache_clear()
        found = [path for split in ("train", "test") for path in paths(open_split(data(copy.parent), split))]
        assert found == [path for path in expected if path != "bass/image_0000.jpg"]
        error = capsys.readouterr().err
        assert "101_ObjectCategories: 1 of 60 images do not decode and are left out: bass/image_0000.jpg (" in error
        assert error.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    dataset._open.cache_clear()
    open_split(data(copy.parent), "test")
    assert capsys.readouterr().err == ""


def test_a_link_to_nowhere_is_a_corrupt_image(copy, monkeypatch, capsys):
    (copy / "bass" / "image_0000.jpg").unlink()
    (copy / "bass" / "image_0000.jpg").symlink_to("nowhere")
    monkeypatch.setattr("caltech101_amp.corrupt_images.MAX_BAD_SHARE", 0.02)
    assert sum(len(open_split(data(copy.parent), split)) for split in ("train", "test")) == 59
    assert "left out: bass/image_0000.jpg ([Errno 2] No such file" in capsys.readouterr().err


def test_more_than_a_hundredth_is_refused(copy):
    corrupt(copy, 7)
    words = "7 of 60 images do not decode, more than 1%: bass/image_0000.jpg .* and 2 more; unpack the data set again"
    with pytest.raises(UserError, match=words):
        open_split(data(copy.parent), "train")


def test_images_are_decoded_once(copy, monkeypatch):
    open_split(data(copy.parent), "train")
    dataset._open.cache_clear()
    monkeypatch.setattr("caltech101_amp.corrupt_images.open_image", pytest.fail)
    open_split(data(copy.parent), "train")
    os.utime(copy / "cup" / "image_0000.jpg", (0, 0))
    dataset._open.cache_clear()
    monkeypatch.setattr("caltech101_amp.corrupt_images.open_image", lambda _: 1 / 0)
    with pytest.raises(UserError, match="60 of 60 images do not decode"):
        open_split(data(copy.parent), "train")
