"""Run commands as a user does, with output and exit status, without starting Python anew."""

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import _python_exit
from contextlib import contextmanager
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from common.errors import run_command


class Ended(NamedTuple):
    """What a finished process has printed."""

    stdout: str
    stderr: str

    @property
    def words(self) -> str:
        """The standard output as one line, however it was wrapped."""
        return " ".join(self.stdout.split())


Main = Callable[[list[str]], object]
TIMEOUT = 240.0  # seconds
LATE_IMPORTS = ("torch._dynamo", "matplotlib.figure", "matplotlib.backends.backend_agg")
LATE_IMPORTS += ("timm.data", "timm.models", "rich.logging")


@cache
def import_once() -> None:
    """Do once what training does first, instead of in each forked process: late imports, a count of
    FLOPs, the measurement of the CPU's peak (3 s).
    """
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    # here, as most users of this file need no torch
    torch = importlib.import_module("torch")
    flops = importlib.import_module("common.model.flops")
    flops.peak_images_per_s({"image_size": 224}, None, 1, torch.device("cpu"))


@contextmanager
def forked(
    main: Main, argv: Sequence[object] = (), **environ: str
) -> Iterator[tuple[BaseProcess, Path, Path]]:
    """Run ``main(argv)`` as a script does; yield its process and the files of stdout and stderr."""
    import_once()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        process = multiprocessing.get_context("fork").Process(
            target=_run, args=(main, argv, outputs, environ)
        )
        process.start()
        try:
            yield process, *outputs
        finally:
            process.kill()
            process.join()


def run_forked(main: Main, argv: Sequence[object] = (), code: int = 0, **environ: str) -> Ended:
    """Run ``main(argv)`` by `forked`; expect this exit status (-9: a signal), no traceback."""
    with forked(main, argv, **environ) as (process, stdout, stderr):
        process.join(TIMEOUT)
        exit_status = process.exitcode
        out = stdout.read_text()
        err = stderr.read_text()
    assert exit_status == code, (
        f"{argv}: exit status {exit_status}, None after {TIMEOUT:g} s:\n{out}\n{err}"
    )
    assert "Traceback" not in err, err
    return Ended(out, err)


def _run(
    main: Main, argv: Sequence[object], outputs: Sequence[Path], environ: Mapping[str, str]
) -> None:
    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY), descriptor)
    sys.stdout, sys.stderr = (
        os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2)
    )
    sys.__stdout__ = sys.stdout
    sys.__stderr__ = sys.stderr
    os.environ.update(environ)
    try:
        run_command(main, [str(word) for word in argv])
    finally:
        _python_exit()  # ends process pools, as at the exit of a process that was not forked


def run_python(program: str, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the text of a program in a new Python, by `subprocess.run`."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True, **options
    )


def in_words(*settings: str) -> list[str]:
    """Return the words of a command line that set ``KEY=VALUE``."""
    return [word for setting in settings for word in ("--set", setting)]


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until ``condition()`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.05)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie that nobody has waited for."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the content of every file in a folder, by its path in there."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
