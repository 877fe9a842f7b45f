"""Fetch a file over HTTP once for all processes of a machine, go on where it broke off, check it and unpack it."""

import hashlib
import shutil
import ssl
import stat
import tarfile
import time
import zipfile
import zlib
from gzip import BadGzipFile
from http.client import HTTPException
from lzma import LZMAError
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tqdm import tqdm

from common.errors import UserError

CHUNK = 1 << 20
TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = 5  # in a row that bring nothing
PAUSE = 2.0  # seconds before another attempt

# RuntimeError: a zip archive that asks for a password, or for a compression that Python does not know
DAMAGED = (tarfile.TarError, zipfile.BadZipFile, EOFError, BadGzipFile, zlib.error, LZMAError, RuntimeError)
NETWORK_ERRORS = (URLError, HTTPException, ConnectionError, TimeoutError, ssl.SSLError)
RANGE_NOT_SATISFIABLE = 416


def download(url: str, path: Path, md5: str) -> None:
    """Download ``url`` to ``path``, which appears only when it is whole and its MD5 is right.

    What an earlier call left in ``path.partial`` is not fetched again. Raises `UserError` after `ATTEMPTS` attempts
    without a byte, at once if the server refuses, and for a wrong MD5, after which the next call starts afresh. Only
    one process at a time may do this (see `common.files.folder_lock`).
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        _download(url, partial)
    except HTTPError as error:
        raise UserError(f"{url}: {error.code} {error.reason}; fetch the file yourself as {path}") from error
    except NETWORK_ERRORS as error:
        reason = str(error) or type(error).__name__
        raise UserError(
            f"{url}: {reason}; run the same command to go on, or fetch the file yourself as {path}"
        ) from error
    except OSError as error:
        raise UserError(f"{partial}: {error.strerror}; make room or choose another folder") from error
    check_md5(partial, md5, remove=True)
    partial.replace(path)


def _download(url: str, partial: Path) -> None:
    """Fetch what is missing of a file, in as many attempts as bring something."""
    stalled = 0
    while True:
        before = _size(partial)
        try:
            return _fetch_rest(url, partial)
        except NETWORK_ERRORS as error:
            if isinstance(error, HTTPError) and error.code < 500:
                if error.code == RANGE_NOT_SATISFIABLE and before:  # nothing is missing
                    return None
                raise
            stalled = 0 if _size(partial) > before else stalled + 1
            if stalled == ATTEMPTS:
                raise
            time.sleep(PAUSE)


def _fetch_rest(url: str, partial: Path) -> None:
    have = _size(partial)
    request = Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urlopen(request, timeout=TIMEOUT) as response:
        if response.status != 206:  # the server sends the whole file, whatever was asked
            have = 0
        length = response.headers["Content-Length"]
        total = have + int(length) if length else None
        with (
            open(partial, "ab" if have else "wb") as file,
            tqdm(total=total, initial=have, unit="B", unit_scale=True, desc=partial.stem) as bar,
        ):
            while chunk := response.read1(CHUNK):
                file.write(chunk)
                bar.update(len(chunk))
    if total is not None and _size(partial) < total:
        raise ConnectionError(f"the connection ended after {_size(partial)} of {total} bytes")


def check_md5(path: Path, md5: str, *, remove: bool = False) -> None:
    """Raise `UserError` if the file's MD5 is another; ``remove`` it first."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() == md5:
        return
    if remove:
        path.unlink()
    remedy = "it was removed: run the same command again" if remove else "remove it and fetch it again"
    raise UserError(f"{path}: MD5 {digest.hexdigest()} is not {md5}; {remedy}")


def extract(archive: Path, name: str, folder: Path) -> None:
    """Unpack the tar or zip archive's folder ``name`` as ``folder / name``, which appears only when it is whole.

    Raises `UserError` for an archive that is damaged, lacks the folder, or has a path or link that leads out of it.
    """
    unpacked = folder / f".{name}.partial"
    shutil.rmtree(unpacked, ignore_errors=True)
    try:
        _unpack(archive, unpacked)
        (unpacked / name).rename(folder / name)
    except DAMAGED as error:
        raise UserError(f"{archive}: {' '.join(str(error).split())}; remove it and fetch it again") from error
    except OSError as error:
        raise UserError(f"{archive}: {name} cannot be unpacked into {folder} ({error.strerror})") from error
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


def _unpack(archive: Path, folder: Path) -> None:
    if not zipfile.is_zipfile(archive):
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        return
    with zipfile.ZipFile(archive) as container:
        for member in container.infolist():
            # zipfile would put a path that leads out of the folder somewhere within it, and write a link as a file
            path = Path(member.filename)
            if path.is_absolute() or ".." in path.parts or stat.S_ISLNK(member.external_attr >> 16):
                raise zipfile.BadZipFile(f"{member.filename!r} leads out of the archive's folder")
        container.extractall(folder)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
