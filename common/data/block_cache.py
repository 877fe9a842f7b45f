"""A cache of what is read, on a local disk."""

import fcntl
import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from crc32c import crc32c

from common.errors import UserError, printable

OWN = re.compile(r"[0-9a-f]{64}(\.\d+\.\d+)?")  # the names of our files, complete or being written
SUM = 4  # bytes of the checksum that ends a file
KEPT = 0.9  # of the bound, after an eviction


class BlockCache:
    """Files of at most ``most`` bytes in all, shared by processes; the least recently used are evicted.

    A file gets its name when it is complete, and its checksum is verified when it is read. Where the disk cannot be
    written, reading continues without the cache, with one warning.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most, self._has_warned = folder, most, False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".used").touch()
        except OSError as error:
            raise UserError(f"DATA.cache={folder}: cannot be written ({error.strerror}); choose another") from error

    def read(self, key: str, fetch: Callable[[], bytes]) -> memoryview:
        """Return what is stored under ``key``, or what ``fetch()`` returns, which is then stored."""
        path = self._path(key)
        if (data := _load(path)) is None:
            data = memoryview(fetch())
            self._store(path, data)
        return data

    def drop(self, key: str) -> None:
        """Forget what is stored under ``key``."""
        with suppress(OSError):  # a disk that cannot be written, of which `_store` has warned
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / hashlib.sha256(key.encode()).hexdigest()

    def _store(self, path: Path, data: memoryview) -> None:
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # it may have been wiped
            if not self._reserve(len(data) + SUM):
                return
            try:
                with temporary.open("wb") as file:
                    file.write(data)
                    file.write(crc32c(data).to_bytes(SUM, "little"))
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                reason = f"{error.strerror}; continuing without it: lower DATA.cache_gb, or free it"
                sys.stderr.write(f"warning: DATA.cache={printable(self.folder)}: {reason}\n")

    def _reserve(self, size: int) -> bool:
        """Count ``size`` more bytes as used, after an eviction if need be; return whether they fit."""
        if size > self.most:
            return False
        with (self.folder / ".used").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            counted = file.read()  # nothing in a new folder; too little after a kill, until the next eviction
            used = int(counted) if counted.isdecimal() else self.most
            if used + size > self.most:
                used = self._evict(min(KEPT * self.most, self.most - size))
            file.truncate(0)
            file.write(str(used + size))
        return True

    def _evict(self, room: float) -> int:
        """Remove the files that were not read for longest, what killed processes left among them, down to ``room``.

        The folder may hold files of the user's, which are neither counted nor removed.
        """
        states = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):  # another process renames what it has written
                if OWN.fullmatch(entry.name):
                    states.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        used = sum(size for _, size, _ in states)
        for _, size, path in sorted(states):
            if used <= room:
                break
            Path(path).unlink(missing_ok=True)
            used -= size
        return used


def _load(path: Path) -> memoryview | None:
    try:
        content = memoryview(path.read_bytes())
        os.utime(path)
    except OSError:
        return None
    data = content[:-SUM]
    is_good = len(content) >= SUM and crc32c(data) == int.from_bytes(content[-SUM:], "little")
    return data if is_good else None
