"""A data set on a web server or in S3, with faults, gives the batches of the same folder."""

import itertools
import re
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.config.schema import Data
from common.data import remote
from common.errors import UserError
from imagenet_dali.dataset import open_split
from imagenet_dali.task import build_eval_loader, build_train_loader, describe_data

SECRET = "never-to-be-printed"


@pytest.fixture
def server(colours: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Serve the files of the data set at the URLs ``http`` and ``s3``; ``fault`` of a path is "cut" or a status."""
    state = SimpleNamespace(fault=lambda _: None, requests=[], s3="s3://bucket/shards")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            state.requests.append(self.path)
            fault, path = state.fault(self.path), colours.parent / self.path.partition("/bucket/")[2]
            status, content = 200, path.read_bytes() if path.is_file() else b""
            if wanted := self.headers["Range"]:
                start, end = map(int, re.findall(r"\d+", wanted))
                status, size, content = 206, len(content), content[start : end + 1]
            if isinstance(fault, int) or not path.is_file():
                status, content = fault or 404, f"{self.headers['Authorization']} {SECRET}".encode()
            self.send_response(status)
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{start + len(content) - 1}/{size}")
            self.send_header("ETag", "1")
            self.send_header("Last-Modified", "Mon, 23 Nov 2026 00:00:00 GMT")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.close_connection = fault == "cut"
            self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        base = f"http://127.0.0.1:{http.server_port}"
        state.http = f"{base}/bucket/shards"
        for name, value in dict(ENDPOINT_URL=base, ACCESS_KEY_ID="id", SECRET_ACCESS_KEY=SECRET).items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield state
        http.shutdown()


def batches(data: dict[str, object]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    place = dict(image_size=16, dp_rank=0, dp_size=1, device=torch.device("cpu"))
    loaders = build_train_loader(data, 16, 8, seed=3, **place), build_eval_loader(data, 8, **place)
    found = [batch for loader in loaders for batch in loader]
    for loader in loaders:
        loader.close()
    return found


@pytest.mark.parametrize(
    ("scheme", "loader", "order"),
    [("http", "dali", "blocks"), ("s3", "torchvision", "blocks"), ("s3", "torchvision", "random")],
)
def test_data_are_those_of_the_folder(server, colours, tmp_path, scheme, loader, order) -> None:
    faults = itertools.cycle([None, 503, "cut", 500, None])
    server.fault = lambda path: next(faults) if "/shards/train/" in path else None
    local = Data(root=str(colours), loader=loader, order=order, workers=1, block=0.005).model_dump()
    remote = local | dict(root=getattr(server, scheme), cache=str(tmp_path), cache_gb=0.1)
    assert describe_data(remote) == describe_data(local)
    for _ in range(2):
        for batch, other in zip(batches(remote), batches(local), strict=True):
            assert all(map(torch.equal, batch, other))
        assert any("shards/validation/" in path for path in server.requests)
        requests = len(server.requests)
    batches(remote)
    assert len(server.requests) == requests  # the cache has everything


def test_a_shard_that_cannot_be_read_is_named(server, colours, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(remote, "PATIENCE", timedelta(seconds=0.3))
    split = open_split(server.s3, "train", remote.BlockCache(tmp_path, 10**6))
    for fault, reason in ((500, "status code: 500"), ("cut", "error")):
        server.fault = lambda _, fault=fault: fault
        with pytest.raises(UserError, match=rf"^{server.s3}/train/train-00000-of-00001: .*{reason}.*; check the name"):
            split.read(3)
    server.fault = lambda _: None
    records = split.read_span(0, 9)
    (block,) = tmp_path.iterdir()
    block.write_bytes(bytes(block.stat().st_size))
    assert split.read_span(0, 9) == records == open_split(colours, "train").read_span(0, 9)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/other", "^s3://bucket/other/manifest.json: .*status code: 404; check .* the credentials"),
        (f"https://me:{SECRET}@host/x", "^https://host/x: give the URL without user, password or query"),
        (f"s3://bucket/x?signature={SECRET}", "^s3://bucket/x: give the URL without user, password or query"),
    ],
)
def test_bad_places_are_named_without_a_secret(server, url, message) -> None:
    with pytest.raises(UserError, match=message) as error:
        open_split(url, "train")
    assert SECRET not in str(error.value)
