"""Archives that are downloaded and unpacked."""

import hashlib
import io
import os
import tarfile
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest

from common.data.download import extract, fetch
from common.errors import UserError
from common.testing.ranks import run_ranks

CONTENT = np.random.default_rng(0).bytes(300_000)


def write_archive(path: Path, *members: str) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            info = tarfile.TarInfo(member)
            info.size = len(CONTENT)
            tar.addfile(info, io.BytesIO(CONTENT))
    return path


@pytest.mark.parametrize("members", [["data/one", "data/../../../evil"], ["other"], ["data/one"]])
def test_what_cannot_be_unpacked_leaves_nothing(tmp_path, members):
    folder = tmp_path / "folder"
    folder.mkdir()
    archive = write_archive(tmp_path / "archive.tgz", *members)
    if members == ["data/one"]:
        os.truncate(archive, 100_000)
    with pytest.raises(UserError, match=r"data cannot be unpacked into .* \(.+\); check the free"):
        extract(archive, "data", folder)
    assert sorted(tmp_path.rglob("*")) == [archive, folder]


def test_four_processes_download_and_unpack_once(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    source = write_archive(tmp_path / "archive.tar.gz", "a/data/one")
    md5 = hashlib.md5(source.read_bytes()).hexdigest()
    folder = tmp_path / "new/a/data"
    archive = tmp_path / "new/a.tgz"
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}/archive.tar.gz"
        words = f"^{url}: File not found or corrupted.*; rerun the command, or download"
        with pytest.raises(UserError, match=words):
            fetch(folder, archive, url, "0", True, "data/", "4 TB")
        with pytest.raises(UserError, match="a.tgz: its MD5 is not 0: --set DATA.download=True"):
            fetch(folder, archive, url, "0", False, "data/", "4 TB")
        archive.unlink()
        capfd.readouterr()
        run_ranks(4, fetch, folder, archive, url, md5, True, "data/", "4 TB")
        http.shutdown()
    # one process: the address, then the content
    assert capfd.readouterr().err.count('"GET /archive.tar.gz') == 2
    assert (folder / "one").read_bytes() == CONTENT
