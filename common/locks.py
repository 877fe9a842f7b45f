"""The lock of a folder: one process at a time writes into it."""

import contextlib
import fcntl
import os
import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError
from common.files import read_text
from common.text import print_wrapped

HOLDER = ".lock-holder"  # stands for a lock where the file system has none

# The locks of this process by folder: the descriptor, as a file object left open warns at exit, and
# whether the folder was made for the lock.
_locks: dict[Path, tuple[int, bool]] = {}


def lock_folder(folder: Path, *, wait: bool = False) -> None:
    """Create ``folder`` and lock it until `unlock_folder`, or until this process ends.

    Forked processes do not hold it. Raises `UserError` if another process holds it and ``wait`` is
    false, and if the folder cannot be written.
    """
    # A second handle must not be opened: closing it would release the lock.
    if folder in _locks:
        raise UserError(f"{folder} is being written by this process: choose another folder")
    # Seen before `mkdir`: `remove_unused` removes only what this process has made.
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(
            folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
        )
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); choose another"
        ) from error
    how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    try:
        # A POSIX lock: the kernel releases it when the process ends, however it ends.
        fcntl.lockf(handle, how)
    except (BlockingIOError, PermissionError) as error:
        os.close(handle)
        raise UserError(
            f"{folder} is being written by another process: choose another folder, or wait for its "
            "end"
        ) from error
    except OSError:  # The file system has no locks.
        _write_holder(folder, wait)
    _locks[folder] = handle, is_new


def _write_holder(folder: Path, wait: bool) -> None:
    """Hold ``folder`` by a file that names this process, until `unlock_folder`.

    A process that was killed leaves the file. On its own host it is seen to have ended.
    """
    holder = folder / HOLDER
    while True:
        with contextlib.suppress(FileExistsError), holder.open("x") as file:
            file.write(f"{platform.node()} {os.getpid()} {_start_of(os.getpid())}")
            print_wrapped(
                f"warning: {folder} is on a file system without locks: {HOLDER} in it names this "
                "process instead",
                is_warning=True,
            )
            return
        # The file may be empty, if its process was killed before the write.
        host, pid, start, *_ = f"{read_text(holder)} unknown unknown unknown".split()
        if host == platform.node() and _start_of(pid) != start:
            holder.unlink(missing_ok=True)
        elif wait:
            time.sleep(1)
        else:
            raise UserError(
                f"{folder} is being written by process {pid} on host {host}: choose another "
                f"folder, or if that process has ended, remove {holder}"
            )


def _start_of(pid: object) -> str:
    """Return when a process of this host was started, in ticks; "" if there is none.

    Another process may have the same id later, but not the same start.
    """
    with contextlib.suppress(OSError):
        # The start is field 22. The command, field 2, may have spaces and parentheses itself.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


@contextlib.contextmanager
def folder_lock(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of ``folder`` within the context; see `lock_folder`."""
    lock_folder(folder, wait=wait)
    try:
        yield
    finally:
        unlock_folder(folder)


def remove_unused(folder: Path) -> None:
    """Remove ``folder`` if this process has created it and written nothing into it but the lock."""
    if folder in _locks:
        _, is_new = _locks[folder]
        unlock_folder(folder)
        if is_new and [path.name for path in folder.iterdir()] == [".lock"]:
            shutil.rmtree(folder)


def unlock_folder(folder: Path) -> None:
    """Let go of the lock of ``folder``, if this process holds it."""
    if folder in _locks:
        os.close(_locks.pop(folder)[0])
        (folder / HOLDER).unlink(missing_ok=True)
