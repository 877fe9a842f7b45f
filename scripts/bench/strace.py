"""Count what this process and its children ask of files, with strace."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import UserError
from common.tools.harness import Row

CALLS = ("openat", "read", "pread64", "sendfile")
CALL = re.compile(rf"\b({'|'.join(CALLS)})\(.* = (\d+)")


@contextmanager
def counted(folder: Path, counts: Row) -> Iterator[None]:
    """Count the opens and reads of files in the folder by this process and its children."""
    with TemporaryDirectory() as log_folder:
        log, me = Path(log_folder) / "log", Path("/proc/self/status")
        command = ["strace", "-f", "-y", "-z", "-s0", "-qq", "-e", f"trace={','.join(CALLS)}", "-o", str(log)]
        tracer = subprocess.Popen([*command, "-p", str(os.getpid())])
        while "TracerPid:\t0" in me.read_text():
            if tracer.poll() is not None:
                raise UserError("strace cannot trace here: allow ptrace, or uninstall strace to skip the count")
            time.sleep(0.01)
        try:
            yield
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.wait()
            counts |= {"opens": 0, "reads": 0, "bytes": 0}
            for line in log.read_text().splitlines():
                call = CALL.search(line)
                if not call or f"{folder}/" not in line or "O_DIRECTORY" in line:
                    continue
                is_open = call[1] == "openat"
                counts["opens" if is_open else "reads"] += 1
                counts["bytes"] += 0 if is_open else int(call[2])
