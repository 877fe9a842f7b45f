"""An S3 server, and a proxy before it that answers late, wrongly or in part."""

import http.client
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from moto.server import ThreadedMotoServer

SECRET = "never-to-be-printed"
BUCKET = "bucket"


class Store:
    """The two servers; ``fault`` returns what goes wrong with a request, given its method and path.

    That is a status, "cut" (the connection, in the midst of the body) or "short" (half a body, by a length that fits).
    """

    def __init__(self) -> None:
        self.latency, self.requests = 0.0, 0
        self.fault: Callable[[str, str], int | str | None] = lambda *_: None
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._moto.start()
        self.target = "{}:{}".format(*self._moto.get_host_and_port())
        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": self}))
        self._proxy.daemon_threads = True
        self._proxy.handle_error = lambda *_: None  # of a client that was killed
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
        self.host = f"127.0.0.1:{self._proxy.server_port}"
        self.environ = {
            "AWS_ENDPOINT_URL": f"http://{self.host}",
            "AWS_ACCESS_KEY_ID": f"{SECRET}-id",
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }
        self.request("PUT", f"/{BUCKET}")

    def request(self, method: str, path: str, body: bytes = b"", headers: Any = None) -> tuple[Any, bytes]:
        """Return the S3 server's own answer, and its body."""
        connection = http.client.HTTPConnection(self.target)
        try:
            connection.request(method, path, body, headers or {"x-amz-acl": "public-read"})
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def upload(self, folder: Path) -> str:
        """Upload a folder; return its URL."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.request("PUT", f"/{BUCKET}/{folder.name}/{path.relative_to(folder)}", path.read_bytes())
        return f"s3://{BUCKET}/{folder.name}"

    def close(self) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()
        self._moto.stop()


@contextmanager
def running_store() -> Iterator[Store]:
    """Run the servers in threads of this process."""
    store = Store()
    try:
        yield store
    finally:
        store.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def _forward(self) -> None:
        store, body = self.store, self.rfile.read(int(self.headers.get("Content-Length", 0)))
        store.requests += 1
        fault = store.fault(self.command, self.path)
        time.sleep(store.latency)
        if isinstance(fault, int):  # S3 quotes the request
            return self._answer(fault, [], f"{self.headers['Authorization']} {SECRET}".encode())
        answer, content = store.request(self.command, self.path, body, dict(self.headers))
        kept = [pair for pair in answer.getheaders() if pair[0].lower() not in ("connection", "date", "server")]
        if fault == "short":
            kept, content = [pair for pair in kept if pair[0] != "Content-Length"], content[: len(content) // 2]
        self._answer(answer.status, kept, content[: len(content) // 2] if fault == "cut" else content)
        if fault == "cut":
            self.close_connection = True
        return None

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name == "Content-Length" for name, _ in headers):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass
