"""A headless Chromium for tests, over its DevTools protocol on a pipe: no port, no driver to install.

Protocol: https://chromedevtools.github.io/devtools-protocol; messages are JSON, each ended by a zero byte.
"""

import base64
import fcntl
import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe"
)
SILENCE = 60  # seconds


class Page:
    """One tab: ``problems`` are its console errors and exceptions, ``requests`` the addresses it asked for."""

    def __init__(self, commands: IO[bytes], answers: IO[bytes]):
        self.commands, self.answers = commands, answers
        self.buffer = b""
        self.session: str | None = None
        self.number = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; what happens until then is noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            if not select.select([self.answers], [], [], SILENCE)[0]:
                raise TimeoutError(f"Chromium said nothing for {SILENCE} s")
            part = os.read(self.answers.fileno(), 1 << 16)
            if not part:
                raise RuntimeError("Chromium has ended")
            self.buffer += part
        text, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(text)
        event, params = message.get("method"), message.get("params", {})
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"]["exception"].get("description", "exception"))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.problems.append(str(params["args"]))
        elif event == "Page.loadEventFired":
            self.loaded = True
        return message

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open an address in a window of this size, and wait until it is loaded and drawn."""
        self.do(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme])
        self.loaded = False
        self.problems.clear()
        self.requests.clear()
        self.do("Page.navigate", url=address)
        while not self.loaded:
            self._receive()
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, a promise's once it is kept."""
        answer = self.do("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", expression))
        return answer["result"].get("value")

    def hover(self, x: float, y: float) -> None:
        """Move the mouse to a point of the window."""
        self.do("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """Save a picture of the whole page as PNG."""
        data = self.do("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def open_browser() -> Iterator[Page]:
    """Start Chromium with an empty profile; on leaving, it and its profile are gone."""
    command_out, command_in = _high_pipe()
    answer_out, answer_in = _high_pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        line = f"exec chromium {FLAGS} --user-data-dir={profile} 3<&{command_out} 4>&{answer_in}"
        process = subprocess.Popen(
            ["bash", "-c", line],
            pass_fds=(command_out, answer_in),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(command_out)
        os.close(answer_in)
        with os.fdopen(command_in, "wb", buffering=0) as commands, os.fdopen(answer_out, "rb", buffering=0) as answers:
            try:
                page = Page(commands, answers)
                yield page
                page.session = None
                page.do("Browser.close")
                process.wait(SILENCE)
            finally:
                with suppress(ProcessLookupError):  # all have ended
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _high_pipe() -> tuple[int, int]:
    """Return a pipe whose ends are none of the descriptors 3 and 4, which Chromium's command line takes."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high
