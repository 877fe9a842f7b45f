"""A Hugging Face Hub on loopback: repositories in memory that can be created, committed to and downloaded from."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(ThreadingHTTPServer):
    """What it holds, ``files[id][name]``, what was asked of it, and the token that writing needs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.token = "hf_secret"

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

    def do_POST(self) -> None:
        self.server.requests.append(f"POST {self.path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != f"Bearer {self.server.token}":
            self._answer(401, b'{"error": "Invalid credentials"}')
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.files.setdefault(name, {})
            self._answer(200, json.dumps({"url": f"{self.server.url}/{name}"}).encode())
        elif self.path == "/api/validate-yaml":
            self._answer(200, b"{}")
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._answer(200, json.dumps({"files": files}).encode())
        else:
            self._commit(body)

    def _commit(self, body: bytes) -> None:
        name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                value = line["value"]
                self.server.files[name][value["path"]] = base64.b64decode(value["content"])
        answer = {"commitUrl": f"{self.server.url}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40}
        self._answer(200, json.dumps(answer).encode())

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
