import hashlib
import io
import stat
import tarfile
import threading
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from common.data import download as module
from common.data.download import check_md5, download, extract
from common.errors import UserError

CONTENT = np.random.default_rng(0).bytes(3_000_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server:
    """Serves `CONTENT`, as each request's entry of ``behaviours`` says; the last one is for all that follow."""

    def __init__(self, *behaviours: str) -> None:
        self.behaviours = list(behaviours) or ["whole"]
        self.ranges: list[str | None] = []
        self.stop = threading.Event()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
        self.ranges.append(request.headers["Range"])
        if behaviour.isdigit():
            request.send_error(int(behaviour))
            return
        start = int((request.headers["Range"] or "bytes=0-")[6:-1])
        start = 0 if behaviour == "no ranges" else start
        if start == len(CONTENT):
            request.send_error(416)
            return
        content = (b"wrong" + CONTENT[5:] if behaviour == "wrong" else CONTENT)[start:]
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content[: 1_000_000 if behaviour in ("drops", "stalls") else None])
        request.wfile.flush()
        if behaviour == "stalls":
            self.stop.wait(10)


@contextmanager
def serving(server: Server):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}/file"
        finally:
            server.stop.set()
            http.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.01)
    monkeypatch.setattr(module, "TIMEOUT", 1.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("behaviours", "ranges"),
    [
        (["whole"], [None]),
        (["drops", "drops", "drops"], [None, "bytes=1000000-", "bytes=2000000-"]),
        (["stalls", "whole"], [None, "bytes=1000000-"]),
        (["503", "whole"], [None, None]),
        (["drops", "no ranges"], [None, "bytes=1000000-"]),
    ],
    ids=["at once", "the connection drops", "the server stalls", "the server is busy", "the server knows no ranges"],
)
def test_the_file_arrives_whole(tmp_path, behaviours, ranges):
    server = Server(*behaviours)
    with serving(server) as url:
        download(url, tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.ranges == ranges
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_another_run_goes_on_where_the_last_one_was_stopped(tmp_path):
    (tmp_path / "file.partial").write_bytes(CONTENT[:2_500_000])
    server = Server()
    with serving(server) as url:
        download(url, tmp_path / "file", MD5)
    assert server.ranges == ["bytes=2500000-"]
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_run_stopped_after_the_last_byte_has_nothing_to_fetch(tmp_path):
    (tmp_path / "file.partial").write_bytes(CONTENT)
    with serving(Server()) as url:
        download(url, tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_wrong_bytes_are_removed_and_named(tmp_path):
    with serving(Server("wrong", "whole")) as url:
        with pytest.raises(UserError, match=f"is not {MD5}; it was removed: run the same command again"):
            download(url, tmp_path / "file", MD5)
        assert list(tmp_path.iterdir()) == []
        download(url, tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("behaviour", "words", "requests"), [("404", "404 Not Found; fetch the file yourself", 1), ("500", "500", 5)]
)
def test_a_server_that_refuses_is_named(tmp_path, behaviour, words, requests):
    server = Server(behaviour)
    with serving(server) as url, pytest.raises(UserError, match=words):
        download(url, tmp_path / "file", MD5)
    assert len(server.ranges) == requests


def test_no_server_at_all_is_named(tmp_path):
    with serving(Server()) as url:
        pass
    with pytest.raises(UserError, match="refused.*run the same command to go on"):
        download(url, tmp_path / "file", MD5)


def test_check_md5(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    check_md5(tmp_path / "file", MD5)
    with pytest.raises(UserError, match=f"MD5 {MD5} is not 0; remove it"):
        check_md5(tmp_path / "file", "0")
    assert (tmp_path / "file").exists()


def write_tar(path: Path, **members: bytes | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
            else:
                info = tarfile.TarInfo(name.replace("__", "/"))
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def test_extract(tmp_path):
    archive = write_tar(tmp_path / "archive.tar.gz", data__one=b"1", data__sub__two=b"2", other=b"")
    extract(archive, "data", tmp_path)
    assert (tmp_path / "data" / "one").read_bytes() == b"1"
    assert (tmp_path / "data" / "sub" / "two").read_bytes() == b"2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive.tar.gz", "data"]


def _link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (tarfile.TarInfo("../evil"), "outside the destination"),
        (tarfile.TarInfo("data/../../evil"), "outside the destination"),
        (_link("data/evil", "/etc/passwd", tarfile.SYMTYPE), "absolute path"),
        (_link("data/evil", "../../../evil", tarfile.SYMTYPE), "outside the destination"),
        (_link("data/evil", "../../evil", tarfile.LNKTYPE), "outside the destination"),
        (_link("data/evil", "", tarfile.CHRTYPE), "special file"),
    ],
)
def test_an_archive_that_reaches_out_of_its_folder_is_refused(tmp_path, member, words):
    folder = tmp_path / "folder"
    folder.mkdir()
    archive = write_tar(tmp_path / "archive.tar.gz", data__one=b"1", evil=member)
    with pytest.raises(UserError, match=words):
        extract(archive, "data", folder)
    assert list(folder.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir() if "evil" in path.name] == []


def write_zip(path: Path, *members: tuple[str, bytes], link: str | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as container:
        for name, content in members:
            container.writestr(name, content)
        if link:
            info = zipfile.ZipInfo(link)
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
            container.writestr(info, "/etc/passwd")
    return path


def test_extract_a_zip_archive(tmp_path):
    archive = write_zip(tmp_path / "archive.zip", ("data/one", b"1"), ("data/sub/two", b"2"), ("other", b""))
    extract(archive, "data", tmp_path)
    assert (tmp_path / "data" / "sub" / "two").read_bytes() == b"2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive.zip", "data"]


@pytest.mark.parametrize("evil", ["../evil", "data/../../evil", "/evil", "link"])
def test_a_zip_archive_that_reaches_out_of_its_folder_is_refused(tmp_path, evil):
    folder = tmp_path / "folder"
    folder.mkdir()
    members, link = ([], "data/evil") if evil == "link" else ([(evil, b"")], None)
    archive = write_zip(tmp_path / "archive.zip", ("data/one", b"1"), *members, link=link)
    with pytest.raises(UserError, match="archive.zip: '.*evil' leads out of the archive's folder; remove it"):
        extract(archive, "data", folder)
    assert list(folder.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive.zip", "folder"]


@pytest.mark.parametrize(("field", "value", "words"), [(6, 1, "password required"), (8, 99, "not supported")])
def test_a_zip_archive_that_python_cannot_unpack_is_named(tmp_path, field, value, words):
    archive = write_zip(tmp_path / "archive.zip", ("data/one", b"1"))
    content = bytearray(archive.read_bytes())
    for signature, skipped in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):  # the member's header, and the directory's
        content[content.index(signature) + skipped + field] = value
    archive.write_bytes(content)
    with pytest.raises(UserError, match=f"archive.zip: .*{words}.*; remove it and fetch it again"):
        extract(archive, "data", tmp_path)
    assert list(tmp_path.iterdir()) == [archive]


def test_members_get_no_rights_over_the_machine(tmp_path):
    program = tarfile.TarInfo("data/program")
    program.mode = 0o6777
    extract(write_tar(tmp_path / "archive.tar.gz", data__one=b"1", program=program), "data", tmp_path)
    mode = (tmp_path / "data" / "program").stat().st_mode
    assert not mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH)


def test_a_link_to_a_folder_is_not_written_through(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    member = tarfile.TarInfo("data/link/evil")
    archive = write_tar(
        tmp_path / "archive.tar.gz", data__one=b"1", link=_link("data/link", str(outside), tarfile.SYMTYPE), evil=member
    )
    with pytest.raises(UserError, match="absolute path"):
        extract(archive, "data", tmp_path)
    assert list(outside.iterdir()) == []
    assert not (tmp_path / "data").exists()


def test_a_damaged_zip_archive_leaves_nothing(tmp_path):
    archive = write_zip(tmp_path / "archive.zip", ("data/one", CONTENT))
    archive.write_bytes(archive.read_bytes().replace(CONTENT[:100], bytes(100)))
    with pytest.raises(UserError, match="Bad CRC-32 for file 'data/one'; remove it and fetch it again"):
        extract(archive, "data", tmp_path)
    assert list(tmp_path.iterdir()) == [archive]


@pytest.mark.parametrize("content", [b"no archive", CONTENT[:0]])
def test_what_is_no_archive_is_named(tmp_path, content):
    (tmp_path / "archive.tar.gz").write_bytes(content)
    with pytest.raises(UserError, match="archive.tar.gz: .*; remove it and fetch it again"):
        extract(tmp_path / "archive.tar.gz", "data", tmp_path)


def test_a_truncated_archive_leaves_nothing(tmp_path):
    archive = write_tar(tmp_path / "archive.tar.gz", data__one=CONTENT)
    archive.write_bytes(archive.read_bytes()[:1_000_000])
    with pytest.raises(UserError, match="remove it and fetch it again"):
        extract(archive, "data", tmp_path)
    assert list(tmp_path.iterdir()) == [archive]


def test_an_archive_without_the_folder_is_named(tmp_path):
    archive = write_tar(tmp_path / "archive.tar.gz", other=b"")
    with pytest.raises(UserError, match="data cannot be unpacked into"):
        extract(archive, "data", tmp_path)
