"""Files: read with limits, checked against a schema, checksums, fsync, and the lock of a folder."""

import contextlib
import csv
import fcntl
import hashlib
import math
import os
import platform
import shutil
import stat
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import UserError
from common.text import print_wrapped, printable

ROOT = Path(__file__).resolve().parents[1]  # the repository's folder
HOLDER = ".lock-holder"  # stands for a lock where the file system has none
MAX_TEXT = 1 << 24  # bytes of a file that is read whole; a manifest of 50,000 shards fits
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]


class Schema(BaseModel):
    """An object in a JSON file: no field may be missing, unknown or of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


S = TypeVar("S", bound=BaseModel)


def short_path(path: Path) -> str:
    """Return ``path``, to be printed, relative to the current folder if it is below it."""
    # the current folder is gone, or ``path`` is elsewhere
    with contextlib.suppress(OSError, ValueError):
        path = path.resolve().relative_to(Path.cwd())
    return printable(path)


def canonical_name(name: str) -> str:
    """Return a name as it compares: composed (NFC), as macOS does not, without byte-order mark."""
    return unicodedata.normalize("NFC", name.removeprefix("\ufeff"))


def regular_size(path: Path, most: float = math.inf) -> int:
    """Return the size of a regular file of at most ``most`` bytes; raise `UserError` for others.

    Reading a pipe would wait for a writer, and reading a device might never end.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(state.st_mode):
        raise UserError(f"{path}: not a regular file")
    if state.st_size > most:
        raise UserError(f"{path}: {state.st_size:,} bytes, more than {most:,.0f}")
    return state.st_size


def read_bytes(path: Path, most: int = MAX_TEXT) -> bytes:
    """Return the content of a file that `regular_size` takes."""
    size = regular_size(path, most)
    try:
        with path.open("rb") as file:
            # No more than was allowed: the file may grow while it is read.
            return file.read(size)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def read_text(path: Path, most: int = MAX_TEXT) -> str:
    """Return the UTF-8 text of a regular file, as `read_bytes` does."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def read_names(path: Path) -> list[str]:
    """Return the names in a text file with one on each line; empty lines at its end are none."""
    return [*map(canonical_name, read_text(path).rstrip("\r\n").splitlines())]


def read_json(path: Path, schema: type[S], most: int = MAX_TEXT) -> S:
    """Return the content of a JSON file, as `parse_json` does."""
    return parse_json(read_bytes(path, most), schema, str(path))


def parse_json(text: bytes, schema: type[S], where: str) -> S:
    """Return an object of ``schema``; raise `UserError` for the first field that does not fit.

    ``where`` the text is from begins the message.
    """
    try:
        return schema.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(map(str, first["loc"]))
    line = f"{where}: {field}: " if field else f"{where}: "
    line += first["msg"]
    if first["type"] not in ("missing", "json_invalid"):
        line += f", not {first['input']!r}"
    raise UserError(line[:400])  # the value may be of any length


def own_file(path: Path) -> Path:
    """Create the folder of ``path`` and return ``path``; raise `UserError` if it cannot be written.

    Refuses a link, which in a stranger's run may lead to any file of ours, and a pipe, which waits
    for a reader.
    """
    folder = path.parent
    remedy = "choose another place with --output"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"{path}: a link, or not a regular file; remove it, or {remedy}")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder.is_dir() and os.access(path if path.exists() else folder, os.W_OK)):
        raise UserError(f"{path}: cannot be written; {remedy}")
    return path


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the rows under a header."""
    with own_file(path).open("w", newline="", encoding="utf-8") as file:
        # csv ends lines with CRLF by default.
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def sha256_of(path: Path, most: float = math.inf) -> str:
    """Return the checksum, in hexadecimal, of a file that `regular_size` takes.

    A sparse file may claim any size, and would be read for ever.
    """
    regular_size(path, most)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint_of(parts: Iterable[object]) -> str:
    """Return the sha256, in hexadecimal, of the parts as text, in their order."""
    digest = hashlib.sha256()
    for part in parts:
        text = os.fsencode(str(part))  # names of files need not be valid text
        # With its length: the parts "ab", "c" and "a", "bc" differ.
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on disk."""
    # `open` refuses folders.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
