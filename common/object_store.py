"""Object storage (S3, Google Cloud, Azure) and web servers as paths; obstore makes the requests.

obstore takes credentials from the environment. Its errors quote answers of the server, in which parts of credentials
may be, so that the messages here are our own.
"""

import contextlib
import errno
import io
import itertools
import math
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from common.errors import UserError

CREDENTIALS = {
    "s3:": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs:": "GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az:": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
WEB = ("https:", "http:")  # read only, without lists
PATIENCE = 180.0  # seconds for which a read is retried
RETRYING = timedelta(seconds=20)  # by obstore, without a warning
OPENING_RETRIES = 4  # of other requests, which come before
WHOLE = 1 << 40  # bytes: more than an object that is read at once has
PIECE = 16_000_000  # bytes of a request or a part of an upload
CONNECTIONS = 32
AGAIN = "check the network and the service, and rerun the command"


class NoAnswerError(UserError):
    """No complete answer, which may come later."""


class FileState(NamedTuple):
    """Size of a file and, of an object, its ETag."""

    size: int
    version: str | None = None


class StorePath(PosixPath):
    """An object by its URL, or the prefix of some: as much of `Path` as is used with data sets."""

    def __str__(self) -> str:
        scheme, *rest = self.parts
        return f"{scheme}//{'/'.join(rest)}" if scheme.endswith(":") else super().__str__()

    @property
    def is_web(self) -> bool:
        return self.parts[0] in WEB

    def _request(self, method: str, *args: Any, key: Any = None, is_patient: bool = False, **options: Any) -> Any:
        """Call a function of obstore with the key of this object; raise `UserError`, or OSError if it is not there."""
        if _used_by.setdefault("process", os.getpid()) != os.getpid():
            raise RuntimeError("object storage was used before the fork, which obstore's threads do not survive")
        try:
            store = _connect("//".join(self.parts[:2]), is_patient)
            return getattr(obstore, method)(store, self._key if key is None else key, *args, **options)
        except (BaseError, FileNotFoundError, ValueError) as error:
            raise self._explain(error) from None

    @property
    def _key(self) -> str:
        return "/".join(self.parts[2:])

    def _explain(self, error: Exception) -> Exception:
        text = str(error)
        status = (re.findall(r"status code: (\d+)", text) or [""])[-1]
        if status == "416":
            return EOFError()
        if any(word in text for word in ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")):
            return UserError(f"{self}: no such bucket; check the name, and the region and endpoint in the environment")
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, "no such object", str(self))
        if isinstance(error, PreconditionError):
            return UserError(f"{self}: has changed since the run opened it; restore it, or prepare the data set again")
        if isinstance(error, NotSupportedError):
            return UserError(f"{self}: the server does not support ranges of bytes; use another")
        known = CREDENTIALS.get(self.parts[0], "web servers are read without any")
        if re.search(
            r"latest/(api|meta-data)|computeMetadata|metadata/identity|Account must be specified|Missing\w*Key", text
        ):
            return UserError(f"{self}: no credentials in the environment; set {known}")
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or status in ("401", "403"):
            return UserError(f"{self}: access denied; check the credentials in the environment ({known})")
        retries = re.search(r"after (\d+) retries", text)
        silence = "no connection" if "kind: Connect" in text else "no complete answer"
        reason = f"the server answers {status}" if status else silence
        reason += f" after {retries[1]} retries" if retries else ""
        return NoAnswerError(f"{self}: {reason}; {AGAIN}")

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat_result((stat.S_IFREG, 0, 0, 0, 0, 0, self.state().size, 0, 0, 0))

    def state(self) -> FileState:
        found = self._request("head")
        return FileState(found["size"], found["e_tag"])

    def is_file(self, **_: Any) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return bool(self.stat())
        return False

    def is_dir(self, **_: Any) -> bool:
        return not self.is_web and next(self.walk_objects(), None) is not None

    def exists(self, **_: Any) -> bool:
        return self.is_file() or self.is_dir()

    def resolve(self, strict: bool = False) -> "StorePath":
        return self

    def open(self, mode: str = "r", *_: Any, **__: Any) -> Any:
        assert mode == "rb"
        return io.BytesIO(self.read_bytes())

    def read_bytes(self) -> bytes:
        return self.read_range(0, WHOLE)

    def walk_objects(self) -> Iterator[tuple["StorePath", FileState]]:
        """Yield the objects below this prefix, but not the empty one by which consoles show it as a folder."""
        try:
            for found in itertools.chain.from_iterable(self._request("list")):
                if found["path"] != self._key:
                    yield StorePath(*self.parts[:2], found["path"]), FileState(found["size"], found["e_tag"])
        except BaseError as error:
            raise self._explain(error) from None

    def iterdir(self) -> Iterator["StorePath"]:
        depth = len(self.parts)
        return iter({StorePath(*path.parts[: depth + 1]) for path, _ in self.walk_objects()})

    def glob(self, pattern: str, **_: Any) -> Iterator["StorePath"]:
        return (path for path, _ in self.walk_objects() if path.relative_to(self).match(pattern))

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok or self.is_file():
            self._request("delete")

    def replace(self, target: Any) -> "StorePath":
        self._request("rename", target._key)
        return target

    def upload(self, file: BinaryIO) -> None:
        """Write a file in parts; the object is there when all of them are."""
        if self.is_web:
            raise UserError(f"{self}: web servers are only read; write to a folder or a bucket")
        self._request("put", file, is_patient=True, chunk_size=PIECE, max_concurrency=4)

    def read_range(self, offset: int, length: int, version: str | None = None) -> bytes:
        """Return a part of the object; it is shorter than ``length`` where the object ends.

        Raises `UserError` if the object's ETag is not ``version``.
        """
        data, end = b"", offset + length
        deadline = time.monotonic() + (PATIENCE if self.parts[1] not in _silent else 0.0)
        is_pinned = version and not version.startswith("W/")  # a weak ETag matches nothing
        while offset + len(data) < end:
            options = {"range": (offset + len(data), end)} | ({"if_match": version} if is_pinned else {})
            try:
                answer = self._request("get", options=options, is_patient=self.parts[1] not in _silent)
                end = min(end, answer.meta["size"])
                piece = self._read_body(answer)
                if not piece and offset + len(data) < end:  # bodies may be shorter than their headers say
                    raise NoAnswerError(f"{self}: the server's answers are incomplete; {AGAIN}")
                data, deadline = data + piece, time.monotonic() + PATIENCE
                _silent.discard(self.parts[1])
            except EOFError:  # the object ends before
                break
            except FileNotFoundError:
                raise UserError(f"{self}: not there any more; restore it and rerun the command") from None
            except NoAnswerError as error:
                if time.monotonic() > deadline:
                    _silent.add(self.parts[1])
                    raise
                _warn(error, deadline)
                time.sleep(1)
        return data

    def _read_body(self, answer: Any) -> bytes:
        try:
            return bytes(answer.bytes())
        except BaseError as error:
            raise self._explain(error) from None


def _warn(error: NoAnswerError, deadline: float) -> None:
    """Say once a minute that reading is tried again."""
    if (now := time.monotonic()) - _warned.get("at", -math.inf) > 60:
        _warned["at"] = now
        sys.stderr.write(f"warning: {str(error).partition(';')[0]}; retrying for {deadline - now:.0f} more seconds\n")


@cache
def _connect(base: str, is_patient: bool) -> Any:
    from_url: Any = obstore.store.from_url  # its overloads have no place for a URL that is not known
    retries = {"max_retries": 10_000, "retry_timeout": RETRYING} if is_patient else {"max_retries": OPENING_RETRIES}
    # http only where the URL, or an endpoint in the environment, says so
    options = {"allow_http": True, "timeout": timedelta(minutes=1)}
    return from_url(base, client_options=options, retry_config=retries)


_used_by: dict[str, int] = {}
_warned: dict[str, float] = {}
_silent: set[str] = set()  # buckets and hosts that did not answer a read for `PATIENCE`: the next one does not wait


def is_url(text: object) -> bool:
    """Return whether ``text`` is a URL of object storage or of a web server."""
    return urlsplit(str(text)).scheme + ":" in (*CREDENTIALS, *WEB)


def as_path(text: object) -> Path:
    """Return the path of an object, or of the objects below a prefix, for a URL; else of the file system."""
    if not is_url(text):
        return Path(str(text))
    url = urlsplit(str(text))
    if "@" in url.netloc or url.query or url.fragment:
        raise UserError(
            f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}: give the URL without user, password or query; "
            "credentials are read from the environment"
        )
    if not url.netloc:
        raise UserError(f"{text}: no bucket or host in this URL")
    return StorePath(str(text))


def list_files(root: Path, names: Iterable[str]) -> dict[str, FileState]:
    """Return size and ETag of those of the named files that are below ``root``."""
    if isinstance(root, StorePath) and not root.is_web:
        names = set(names)
        folders = {(root / name).parent for name in names}
        found = {str(path.relative_to(root)): state for folder in folders for path, state in folder.walk_objects()}
        return {name: found[name] for name in names if name in found}

    def look(name: str) -> FileState | None:
        path = root / name
        try:
            if isinstance(path, StorePath):
                return path.state()
            return FileState(path.stat().st_size) if path.is_file() else None
        except FileNotFoundError:
            return None

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return {name: state for name, state in zip(names, pool.map(look, names), strict=True) if state}


@contextlib.contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """Yield the path of the file, or within the context that of a temporary copy of the object."""
    if not isinstance(path, StorePath):
        yield path
        return
    size = path.stat().st_size
    with tempfile.NamedTemporaryFile() as file:
        for offset in range(0, size, PIECE):
            file.write(path.read_range(offset, min(PIECE, size - offset)))
        file.flush()
        yield Path(file.name)


def remove_tree(path: Path) -> None:
    """Remove a folder, or all objects below a prefix, if there are any."""
    if isinstance(path, StorePath):
        if keys := [found._key for found, _ in path.walk_objects()]:
            path._request("delete", key=keys)
    else:
        shutil.rmtree(path, ignore_errors=True)
