"""Workers that decode images: with almost no shared memory, killed, and stuck."""

import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from common.testing.commands import run_forked, wait_until
from common.testing.tiny_task import train

CLONE_NEWNS = 0x20000
WORKERS = ("DATA.workers=2", "TOTAL_BATCH_SIZE=35", "LOG.every=1")


def when_training(output: Path, action: Callable[[], None]) -> None:
    """Call ``action`` from a thread once there is a line in metrics.jsonl."""

    def wait() -> None:
        metrics = output / "metrics.jsonl"
        wait_until(lambda: metrics.is_file() and metrics.stat().st_size)
        action()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a file system")
def test_trains_with_almost_no_shared_memory(data, tmp_path):
    def main(argv: list[str]) -> None:
        assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"], check=True)
        train(data, tmp_path / "run", *WORKERS, "MODEL.image_size=32", "MODEL.patch_size=16")

    assert run_forked(main).stdout.splitlines()[-1].startswith("top1=")


def test_a_worker_that_is_killed_ends_the_run(data, tmp_path):
    output = tmp_path / "run"

    def main(argv: list[str]) -> None:
        when_training(
            output,
            lambda: os.kill(max(p.pid for p in multiprocessing.active_children()), signal.SIGKILL),
        )
        train(data, output, *WORKERS, "NUM_EPOCHS=2000", "CHECKPOINT_EVERY=1")

    *_, line = run_forked(main, code=2).stderr.splitlines()
    assert re.fullmatch("error: DATA.workers=2: a worker has died, status -9; if .*", line)


def test_sigterm_ends_a_run_whose_workers_are_stuck(data, tmp_path):
    def stick() -> None:
        for process in multiprocessing.active_children():
            os.kill(process.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)

    def main(argv: list[str]) -> None:
        when_training(tmp_path / "run", stick)
        train(data, tmp_path / "run", *WORKERS, "NUM_EPOCHS=2000", "TIMEOUT=5")

    assert "SIGTERM: stopping after this step\n" in run_forked(main, code=143).stderr
