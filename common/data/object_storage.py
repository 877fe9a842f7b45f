"""Read objects by ranges of bytes, and keep what is read of slow storage on a local disk."""

import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from common.errors import UserError, first_line, printable

PATIENCE = timedelta(minutes=3)  # for which a request is retried
OWN = re.compile(r"[0-9a-f]{64}\.block")  # how the names of a cache's files start
CHECK_EVERY = 0.01  # of the cache's limit: after so many bytes a process looks how full it is
FULL, EMPTIED = 0.93, 0.9  # of the limit: where eviction starts and ends; other processes write meanwhile


class RemoteFolder:
    """The objects below a URL, which obstore reads and retries, with credentials from the environment.

    It cannot be used in a process that was forked after its first use.
    """

    def __init__(self, url: str) -> None:
        import obstore  # only for URLs

        parts, self.url, from_url = urlsplit(url), url.rstrip("/"), cast(Any, obstore.store.from_url)
        if "@" in parts.netloc or parts.query:
            raise UserError(
                f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}: give the URL without user, password "
                "or query; credentials are read from the environment"
            )
        client = {"allow_http": True, "timeout": timedelta(minutes=1)}  # http where a URL or an endpoint says so
        retries = {"max_retries": 10_000, "retry_timeout": PATIENCE}
        self._store = _explain(url, lambda: from_url(self.url, client_options=client, retry_config=retries))

    def read(self, name: str) -> bytes:
        """Return the content of an object."""
        return _explain(f"{self.url}/{name}", lambda: bytes(self._store.get(name).bytes()))

    def read_range(self, place: str, start: int, length: int) -> bytes:
        """Return a part of the object with the URL ``place``."""
        name = place.removeprefix(f"{self.url}/")
        return _explain(place, lambda: bytes(self._store.get_range(name, start=start, length=length)))


def _explain(place: str, request: Callable[[], Any]) -> Any:
    """Return what ``request()`` does; raise `UserError` for what obstore raises."""
    from obstore.exceptions import BaseError

    try:
        return request()
    except (BaseError, OSError, ValueError) as error:
        # what follows the status is the server's answer, in which parts of credentials may be
        reason = re.split(r"(?<=status code: \d\d\d)", first_line(error))[0]
        raise UserError(
            f"{place}: {reason}; check the name, the network and the credentials in the environment (docs/data.md)"
        ) from None


class BlockCache:
    """Files of at most ``most`` bytes in all, shared by processes; the least recently read are evicted.

    Where the disk cannot be written, reading continues without the cache, with one warning.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most, self._has_warned = folder, most, False
        self._unchecked, self._lock = float(most), threading.Lock()  # bytes written since the last look
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"DATA.cache={folder}: cannot be written ({error.strerror}); choose another") from error

    def path(self, key: str) -> Path:
        """Return where the bytes of ``key`` are stored."""
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.block"

    def read(self, key: str, fetch: Callable[[], bytes]) -> bytes:
        """Return what is stored under ``key``, or what ``fetch()`` returns, which is then stored."""
        path = self.path(key)
        with suppress(OSError):
            data = path.read_bytes()
            os.utime(path)
            return data
        data, temporary = fetch(), path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            self.folder.mkdir(exist_ok=True)  # it may have been wiped
            if self._make_room(len(data)):
                temporary.write_bytes(data)
                temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if not self._has_warned:
                self._has_warned = True
                reason = f"{error.strerror}; continuing without it: lower DATA.cache_gb"
                sys.stderr.write(f"warning: DATA.cache={printable(self.folder)}: {reason}, or free it\n")
        return data

    def _make_room(self, size: int) -> bool:
        """Evict files where the cache is full; return whether ``size`` more bytes fit."""
        with self._lock:
            self._unchecked += size
            if self._unchecked < CHECK_EVERY * self.most:
                return True
            self._unchecked, states = 0, []
            for entry in os.scandir(self.folder):
                with suppress(FileNotFoundError):  # another process renames what it has written
                    if OWN.match(entry.name):  # the folder may hold files of the user's
                        states.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
            used = size + sum(nbytes for _, nbytes, _ in states)
            for _, nbytes, path in sorted(states) if used > FULL * self.most else ():
                if used > EMPTIED * self.most:
                    Path(path).unlink(missing_ok=True)
                    used -= nbytes
            return used <= self.most
