import gc
import hashlib
import io
import multiprocessing
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from common.data import download as module
from common.data.download import download, extract, fetch
from common.errors import UserError

# requests leaves the connection of a refused download to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


@contextmanager
def serving(*answers: int | bytes) -> Iterator[tuple[str, list[str]]]:
    """Serve each request the next answer, a status or a body; yield the address and the paths asked for."""
    left, requests = list(answers), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            answer = left.pop(0)
            if isinstance(answer, int):
                self.send_error(answer)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(max(len(answer), len(CONTENT))))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}/file", requests
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    monkeypatch.setattr(module, "RETRIES", 1)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield
    gc.collect()


@pytest.mark.parametrize(
    "answers",
    [[CONTENT], [CONTENT[:1000], CONTENT], [503, CONTENT], [b"wrong" + CONTENT[5:], CONTENT]],
    ids=["at once", "the connection drops", "the server is busy", "wrong bytes"],
)
def test_the_file_arrives_whole(tmp_path, answers):
    with serving(*answers) as (url, requests):
        download(url, tmp_path / "file", MD5)
        download(url, tmp_path / "file", MD5)  # it is there
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert len(requests) == len(answers)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [(404, "404 Client Error: Not Found"), (b"wrong" + CONTENT[5:], f"does not match the known hash.*{MD5}")],
)
def test_what_cannot_be_downloaded_is_said_in_one_line(tmp_path, answer, words):
    with serving(answer, answer) as (url, _), pytest.raises(UserError, match=words) as error:
        download(url, tmp_path / "file", MD5)
    assert str(error.value).startswith(f"{url}: ")
    assert str(error.value).endswith(f"; rerun the command, or download the file yourself to {tmp_path / 'file'}")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_no_server_at_all_is_named(tmp_path):
    with serving() as (url, _):
        pass
    with pytest.raises(UserError, match="refused.*; rerun the command, or download the file yourself to"):
        download(url, tmp_path / "file", MD5)


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


@pytest.mark.parametrize("write", [write_tar, write_zip])
def test_extract(tmp_path, write):
    archive = write(tmp_path / "archive", "data/one", "data/sub/two", "other")
    extract(archive, "data", tmp_path)
    assert (tmp_path / "data" / "sub" / "two").read_bytes() == CONTENT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "data"]


def test_members_of_a_tar_archive_that_lead_out_are_refused(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    link = tarfile.TarInfo("data/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    for evil in ("../evil", "data/../../evil", link):
        archive = write_tar(tmp_path / "archive", "data/one", evil)
        with pytest.raises(UserError, match="data cannot be unpacked into .*(outside the destination|absolute path)"):
            extract(archive, "data", folder)
        assert list(folder.iterdir()) == []
        assert list(tmp_path.iterdir()) == [folder, archive] or list(tmp_path.iterdir()) == [archive, folder]


def test_members_of_a_zip_archive_that_lead_out_are_not_written(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    archive = write_zip(tmp_path / "archive", "data/one", "../evil", "data/../../evil", "/evil")
    extract(archive, "data", folder)
    assert sorted(tmp_path.rglob("*")) == [archive, folder, folder / "data", folder / "data" / "one"]


def fetch_folder(root: Path, url: str, md5: str, allow_download: bool = True) -> None:
    fetch(root / "data", root / "archive", url, md5, allow_download, "data/ or archive", "4 TB")


def test_of_four_processes_one_downloads_and_unpacks(tmp_path):
    archive = write_tar(tmp_path / "archive", "data/one")
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    context = multiprocessing.get_context("fork")
    with serving(archive.read_bytes()) as (url, requests):
        processes = [context.Process(target=fetch_folder, args=(tmp_path / "new", url, md5)) for _ in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert requests == ["/file"]
    assert (tmp_path / "new" / "data" / "one").read_bytes() == CONTENT


def test_an_archive_that_is_there_is_verified_and_unpacked(tmp_path):
    md5 = hashlib.md5(write_tar(tmp_path / "archive", "data/one").read_bytes()).hexdigest()
    with pytest.raises(UserError, match=f"archive: MD5 {md5} is not 0; remove the file and download it again"):
        fetch_folder(tmp_path, "", "0")
    fetch_folder(tmp_path, "", md5, allow_download=False)
    (tmp_path / "archive").unlink()
    with pytest.raises(UserError, match="DATA.root=.* has no data/ or archive: --set DATA.download=True fetches 4 TB"):
        fetch_folder(tmp_path / "new", "", md5, allow_download=False)
    assert not (tmp_path / "new").exists()


def no_archive(path: Path) -> Path:
    path.write_bytes(b"no archive")
    return path


def cut_short(path: Path) -> Path:
    path.write_bytes(write_tar(path, "data/one").read_bytes()[:100_000])
    return path


def damaged(path: Path) -> Path:
    path.write_bytes(write_zip(path, "data/one").read_bytes().replace(CONTENT[:100], bytes(100)))
    return path


def without_the_folder(path: Path) -> Path:
    return write_tar(path, "other")


@pytest.mark.parametrize("write", [no_archive, cut_short, damaged, without_the_folder])
def test_what_cannot_be_unpacked_leaves_nothing(tmp_path, write):
    archive = write(tmp_path / "archive")
    with pytest.raises(UserError, match=r"archive: data cannot be unpacked into .* \(.+\); check the free space, or"):
        extract(archive, "data", tmp_path)
    assert list(tmp_path.iterdir()) == [archive]
