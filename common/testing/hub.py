"""A Hugging Face Hub on loopback: repositories in memory that can be downloaded from."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(ThreadingHTTPServer):
    """What it holds, ``files[id][name]``, and what was asked of it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        name, _, file = self.path.lstrip("/").partition("/resolve/main/")
        content = self.server.files.get(name, {}).get(file)
        if name not in self.server.files:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif content is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": "0" * 40})
        else:
            etag = hashlib.sha256(content).hexdigest()
            self._answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": "0" * 40})

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_request(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve an empty hub within the context."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()
