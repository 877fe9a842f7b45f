"""Files that are whole and stay so: checksums, what is safely on disk, and a lock that its holder's death releases."""

import contextlib
import fcntl
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from common.errors import UserError


def sha256_of(path: Path) -> str:
    """Return the checksum of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_held: dict[Path, TextIO] = {}


def _held_by(holder: str, folder: Path) -> UserError:
    return UserError(f"{folder} is being written by {holder}: choose another folder, or wait for its end")


def lock_folder(folder: Path, *, wait: bool = False, sign: bool = True) -> None:
    """Create ``folder`` and hold its lock until `unlock_folder`, or until this process ends, however it ends.

    Forked processes do not hold it. With ``wait`` this waits while another process holds it. Without ``sign`` a lock
    file that is there stays as it is until `sign_lock`. Raises `UserError` if one
    does and this does not wait, and if the folder cannot be written. A file system without locks locks nothing.
    """
    if folder in _held:  # to close a second handle would release the lock
        raise _held_by("this process", folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise _held_by(holder, folder) from error
    except OSError:  # a file system without locks
        pass
    _held[folder] = file
    if sign:
        sign_lock(folder)


def sign_lock(folder: Path) -> None:
    """Write into the lock of ``folder``, which this process holds, who that is."""
    file = _held[folder]
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()


@contextlib.contextmanager
def folder_lock(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of ``folder`` within the context; see `lock_folder`."""
    lock_folder(folder, wait=wait)
    try:
        yield
    finally:
        unlock_folder(folder)


def unlock_folder(folder: Path) -> None:
    """Let go of the lock of ``folder``, if this process holds it."""
    if folder in _held:
        _held.pop(folder).close()
