"""Files read with limits, checksums, and the lock of a folder between processes."""

import errno
import fcntl
import os
import platform
import subprocess
import sys
from unittest.mock import Mock

import pytest
from pydantic import Field

from common.errors import UserError
from common.files import (
    Count,
    Schema,
    read_json,
    read_text,
    retry_read,
    sha256_of,
)
from common.locks import lock_folder, unlock_folder
from common.testing.commands import run_python

HOLD = (
    "import sys; from pathlib import Path; from common.locks import lock_folder; "
    "lock_folder(Path(sys.argv[1]))"
)


class Point(Schema):
    x: Count
    names: list[str] = Field([])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"x": 1', "Invalid JSON: EOF .* column 7$"),
        (b"{}", "x: Field required$"),
        (b'{"x": -1}'.ljust(1000), "x: Input should be greater than or equal to 0, not -1"),
        (b'{"x": "1"}', "x: Input should be a valid integer, not '1'$"),
        (b'{"x": 1, "y": 2}', "y: Extra inputs are not permitted"),
        (b"[" * 900, "Invalid JSON: recursion limit"),
        (b" " * 2000, "2,000 bytes, more than 1,000"),
    ],
)
def test_what_does_not_fit_the_schema_is_one_short_line(text, words, tmp_path):
    (tmp_path / "file").write_bytes(text)
    with pytest.raises(UserError, match=f"^{tmp_path}/file: {words}"):
        read_json(tmp_path / "file", Point, 1000)


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (read_text, sha256_of):
        with pytest.raises(UserError, match="not a regular file"):
            read(tmp_path / "pipe")


@pytest.mark.parametrize(("number", "expected_waits"), [(errno.EIO, [1, 1]), (errno.EACCES, [])])
def test_a_read_that_fails_is_repeated_twice_unless_the_path_is_at_fault(
    number, expected_waits, tmp_path, monkeypatch
):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    read = Mock(side_effect=OSError(number, os.strerror(number)))  # of an open file: no name
    with pytest.raises(OSError, match=os.strerror(number)) as error:
        retry_read(tmp_path / "file", read)
    assert error.value.filename == f"{tmp_path}/file"
    assert waits == expected_waits
    assert read.call_count == 1 + len(waits)


NO_LOCKS = "import fcntl; fcntl.lockf = lambda *_: open('/no/such/file'); "


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ("", "written by another process: choose another folder, or wait"),
        (NO_LOCKS, f"written by process [0-9]+ on host {platform.node()}: choose another folder"),
    ],
)
def test_a_folder_is_locked_until_its_holder_ends(tmp_path, monkeypatch, system, words):
    if system:
        monkeypatch.setattr(fcntl, "lockf", Mock(side_effect=OSError(37, "No locks available")))
    program = f"{system}{HOLD}; print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        holder.stdout.readline()
        with pytest.raises(UserError, match=words):
            lock_folder(tmp_path / "run")
        holder.kill()
    lock_folder(tmp_path / "run")
    assert run_python(system + HOLD, tmp_path / "run").returncode == 1
    unlock_folder(tmp_path / "run")
    freed = run_python(system + HOLD, tmp_path / "run")
    assert (freed.returncode, "warning:" in freed.stderr) == (0, bool(system))
