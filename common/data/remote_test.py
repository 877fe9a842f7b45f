"""Archives that are downloaded and unpacked."""

import gc
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from common.data.remote import download, extract, fetch
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
def test_a_download_is_retried_or_refused_in_one_line(tmp_path, first):
    file = tmp_path / "file"
    with serving(first, 404, first, CONTENT) as (url, left):
        with pytest.raises(UserError, match=f"^{url}: .*404.*; rerun the command, or download .* yourself to {file}$"):
            download(url, file, MD5)
        assert list(tmp_path.iterdir()) == []
        for _ in range(2):
            download(url, file, MD5)
    assert left == []
    assert file.read_bytes() == CONTENT


def write_tar(path: Path, *members: str | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(CONTENT) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(CONTENT))
    return path


def test_what_cannot_be_unpacked_leaves_nothing(tmp_path):
    archive, folder, link = tmp_path / "archive", tmp_path / "folder", tarfile.TarInfo("data/link")
    folder.mkdir()
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    members = ["../evil"], ["data/one", link], ["other"]
    contents = [write_tar(archive, *names).read_bytes() for names in members]
    contents.append(write_tar(archive, "data/one").read_bytes()[:100_000])
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
