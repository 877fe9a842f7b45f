"""Data that lie elsewhere: archives to download and unpack, objects to read by ranges and to keep on a local disk."""

import hashlib
import os
import re
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from common.errors import UserError, first_line, printable
from common.files import folder_lock, md5_of

TIMEOUT = 30.0  # seconds without a byte
RETRIES = 3  # after pauses of 1, 2 and 3 seconds

PATIENCE = timedelta(minutes=3)  # for which a request is retried
CHECK_EVERY = 0.01  # of the cache's limit: after so many bytes a process looks how full it is


def fetch(folder: Path, archive: Path, url: str, md5: str, allow_download: bool, needed: str, description: str) -> None:
    """Unpack ``folder`` from ``archive`` beside it, which is downloaded if it is missing and ``DATA.download`` is set.

    If several processes of a machine call this at once, one does the work while the others wait. ``needed`` and
    ``description`` tell the user what was looked for and what a download would get.
    """
    root = archive.parent
    if not allow_download and not (archive.is_file() and md5_of(archive) == md5):
        fault = f"{archive}: its MD5 is not {md5}" if archive.is_file() else f"DATA.root={root} has no {needed}"
        raise UserError(f"{fault}: --set DATA.download=True fetches {description} into it")
    with folder_lock(root, wait=True):
        if not folder.is_dir():  # no other process was first
            download(url, archive, md5)
            extract(archive, folder.name, root)


def download(url: str, path: Path, md5: str) -> None:
    """Download ``url`` to ``path``, unless it is there; it appears only when it is whole and its MD5 right.

    Raises `UserError` where the server cannot be reached or refuses, the MD5 is wrong, or the disk is full.
    """
    import pooch  # takes 0.2 seconds to import, and few runs download

    pooch.get_logger().setLevel("WARNING")
    files = pooch.create(
        path.parent, "", registry={path.name: f"md5:{md5}"}, urls={path.name: url}, retry_if_failed=RETRIES
    )
    try:
        files.fetch(path.name, downloader=pooch.HTTPDownloader(progressbar=True, chunk_size=1 << 20, timeout=TIMEOUT))  # pyright: ignore[reportArgumentType]
    except (OSError, ValueError) as error:  # of requests; of a wrong checksum
        reason = " ".join(str(error).split())
        raise UserError(f"{url}: {reason}; rerun the command, or download the file yourself to {path}") from error


def extract(archive: Path, name: str, folder: Path) -> None:
    """Unpack the tar or zip archive's folder ``name`` as ``folder / name``, which appears only when it is whole.

    Raises `UserError` for an archive that is damaged, lacks the folder, or has a path or link that leads out of it.
    """
    unpacked = folder / f".{name}.partial"
    shutil.rmtree(unpacked, ignore_errors=True)
    try:
        if zipfile.is_zipfile(archive):
            shutil.unpack_archive(archive, unpacked, "zip")  # ignores paths that lead out, writes links as files
        else:
            shutil.unpack_archive(archive, unpacked, "tar", filter="data")
        (unpacked / name).rename(folder / name)
    except Exception as error:  # of a damaged archive, a dozen unrelated types
        reason = " ".join(str(error).split())
        raise UserError(
            f"{archive}: {name} cannot be unpacked into {folder} ({reason}); "
            "check the free space, or remove the archive and download it again"
        ) from error
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


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
    """Files of at most about ``most`` bytes in all, shared by processes: what was read first, as an epoch is a scan.

    Where the disk cannot be written, reading continues without the cache, with one warning.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most, self._has_warned = folder, most, False
        self._unchecked, self._used = float(most), 0  # bytes read since the last look, and found by it
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
            return path.read_bytes()
        data, temporary = fetch(), path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.block")
        try:
            self.folder.mkdir(exist_ok=True)  # it may have been wiped
            if self._has_room(len(data)):
                temporary.write_bytes(data)
                temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if not self._has_warned:
                self._has_warned = True
                reason = f"{error.strerror}; continuing without it: lower DATA.cache_gb"
                sys.stderr.write(f"warning: DATA.cache={printable(self.folder)}: {reason}, or free it\n")
        return data

    def _has_room(self, size: int) -> bool:
        """Return whether ``size`` more bytes fit."""
        self._unchecked += size
        if self._unchecked > CHECK_EVERY * self.most:  # other processes write too
            self._used, self._unchecked = 0, size
            for path in self.folder.glob("*.block"):
                with suppress(FileNotFoundError):  # another process renames what it has written
                    self._used += path.stat().st_size
        return self._used + self._unchecked <= self.most
