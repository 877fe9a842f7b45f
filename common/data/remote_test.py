"""Archives that are downloaded and unpacked; the cache of what is read by ranges."""

import errno
import gc
import hashlib
import io
import os
import random
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from common.data.remote import BlockCache, download, extract, fetch
from common.errors import UserError
from common.testing.ranks import run_ranks

# requests leaves the connection of a refused download to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

CONTENT = np.random.default_rng(0).bytes(300_000)
WRONG = b"wrong" + CONTENT[5:]
MD5 = hashlib.md5(CONTENT).hexdigest()


@contextmanager
def serving(*answers: int | bytes) -> Iterator[tuple[str, list[int | bytes]]]:
    """Serve each request the next answer, a status or a body; yield the address and the answers that are left."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = left.pop(0)
            if isinstance(answer, int):
                return self.send_error(answer)
            self.send_response(200)
            self.send_header("Content-Length", str(max(len(answer), len(CONTENT))))
            self.end_headers()
            return self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}/file", left
        finally:
            http.shutdown()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    monkeypatch.setattr("common.data.remote.RETRIES", 1)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield
    gc.collect()


@pytest.mark.parametrize("first", [CONTENT[:1000], 503, WRONG], ids=["connection drops", "server busy", "wrong bytes"])
def test_a_download_is_retried_and_then_kept(tmp_path, first):
    with serving(first, CONTENT) as (url, left):
        for _ in range(2):
            download(url, tmp_path / "file", MD5)
    assert left == []
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_failed_download_is_one_line(tmp_path):
    file = tmp_path / "file"
    for answer, words in ((404, "404 Client Error: Not Found"), (WRONG, f"does not match the known hash.*{MD5}")):
        with serving(answer, answer) as (url, _), pytest.raises(UserError, match=f"^{url}: .*{words}") as error:
            download(url, file, MD5)
        assert str(error.value).endswith(f"; rerun the command, or download the file yourself to {file}")
        assert "\n" not in str(error.value)
        assert list(tmp_path.iterdir()) == []


def write_tar(path: Path, *members: str | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(CONTENT) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(CONTENT))
    return path


def write_zip(path: Path, *members: str) -> Path:
    with zipfile.ZipFile(path, "w") as container:
        for member in members:
            container.writestr(member, CONTENT)
    return path


@pytest.mark.parametrize(
    ("write", "members"),
    [
        (write_tar, ["data/one", "data/sub/two", "other"]),
        (write_zip, ["data/one", "data/sub/two", "../evil", "data/../../evil", "/evil"]),  # those are not written
    ],
)
def test_a_folder_of_an_archive_is_extracted(tmp_path, write, members):
    folder = tmp_path / "folder"
    folder.mkdir()
    archive = write(tmp_path / "archive", *members)
    extract(archive, "data", folder)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert files == [archive, folder / "data" / "one", folder / "data" / "sub" / "two"]
    assert files[2].read_bytes() == CONTENT


def test_what_cannot_be_unpacked_leaves_nothing(tmp_path):
    archive, folder, link = tmp_path / "archive", tmp_path / "folder", tarfile.TarInfo("data/link")
    folder.mkdir()
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    contents = [write_tar(archive, "data/one", evil).read_bytes() for evil in ("../evil", "data/../../evil", link)]
    contents.append(b"no archive")
    contents.append(write_tar(archive, "data/one").read_bytes()[:100_000])
    contents.append(write_zip(archive, "data/one").read_bytes().replace(CONTENT[:100], bytes(100)))
    contents.append(write_tar(archive, "other").read_bytes())
    for content in contents:
        archive.write_bytes(content)
        with pytest.raises(UserError, match=r"archive: data cannot be unpacked into .* \(.+\); check the free space"):
            extract(archive, "data", folder)
        assert sorted(tmp_path.rglob("*")) == [archive, folder]


def test_of_four_processes_one_downloads_and_unpacks(tmp_path):
    content = write_tar(tmp_path / "archive", "data/one").read_bytes()
    md5, place = hashlib.md5(content).hexdigest(), (tmp_path / "new" / "data", tmp_path / "new" / "archive")
    with serving(content) as (url, left):
        run_ranks(4, fetch, *place, url, md5, True, "data/", "4 TB")
    assert left == []  # one request
    assert (place[0] / "one").read_bytes() == CONTENT
    with pytest.raises(UserError, match="archive: its MD5 is not 0: --set DATA.download=True fetches 4 TB"):
        fetch(tmp_path / "data", tmp_path / "archive", "", "0", False, "data/", "4 TB")


def is_hit(cache: BlockCache, key: str) -> bool:
    fetched, content = [], random.Random(key).randbytes(1000)
    assert cache.read(key, lambda: fetched.append(key) or content) == content
    return not fetched


def test_the_cache_keeps_what_fits(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 11_200)
    for key in "abcdefghijkl":
        assert not is_hit(cache, key)
    assert all(is_hit(BlockCache(tmp_path, 11_200), key) for key in "abcdefghijk")
    assert not is_hit(cache, "l")
    assert not is_hit(BlockCache(tmp_path, 11_200), "m")
    assert len(list(tmp_path.iterdir())) == 11


def test_a_full_disk_costs_the_cache_only(tmp_path: Path, capsys, monkeypatch) -> None:
    def replace(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = BlockCache(tmp_path, 10**6)
    monkeypatch.setattr(Path, "replace", replace)
    assert not any(is_hit(cache, key) for key in "ab")
    assert list(tmp_path.iterdir()) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: DATA.cache={tmp_path}: No space left on device; continuing without it")
