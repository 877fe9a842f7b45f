"""Files: read with limits, checked against a schema, checksums and fsync."""

import contextlib
import csv
import errno
import hashlib
import math
import os
import stat
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import UserError
from common.text import printable

ROOT = Path(__file__).resolve().parents[1]  # the repository's folder
MAX_TEXT = 1 << 24  # bytes of a file that is read whole; a manifest of 50,000 shards fits
READS = 3  # attempts, a second apart
# Errors of a path, which last. Others are of storage: a stale handle, a time-out, a damaged sector.
OF_A_PATH = {
    errno.EACCES,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
}
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Values = Mapping[str, Any]  # a config or a section of it, or an object of a JSON file


class Schema(BaseModel):
    """An object in a JSON file: no field may be missing, unknown or of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


S = TypeVar("S", bound=BaseModel)
Result = TypeVar("Result")


def retry_read(path: Path, read: Callable[[], Result]) -> Result:
    """Return ``read()``, which reads below ``path``; call it again where storage fails.

    Raises an OSError with a path: at once if it is `OF_A_PATH`, else the last of `READS`.
    """
    for attempt in range(1, READS + 1):
        try:
            return read()
        except OSError as error:
            if error.errno in OF_A_PATH or attempt == READS:
                name = error.filename or path  # not known where an open file is read
                raise OSError(error.errno, error.strerror, str(name)) from error
            time.sleep(1)
    raise AssertionError


@contextlib.contextmanager
def path_errors(path: Path) -> Iterator[None]:
    """Raise `UserError` for an error `OF_A_PATH`.

    So what catches `UserError` never takes a server's fault for one of the file.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in OF_A_PATH:
            raise
        raise UserError(f"{path}: {error.strerror}") from error


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
    with path_errors(path):
        state = retry_read(path, path.stat)
    if not stat.S_ISREG(state.st_mode):
        raise UserError(f"{path}: not a regular file")
    if state.st_size > most:
        raise UserError(f"{path}: {state.st_size:,} bytes, more than {most:,.0f}")
    return state.st_size


def read_bytes(path: Path, most: int = MAX_TEXT) -> bytes:
    """Return the content of a file that `regular_size` takes."""
    size = regular_size(path, most)
    with path_errors(path):
        # No more than was allowed: the file may grow while it is read.
        return read_range(path, 0, size)


def read_range(path: Path, offset: int, length: int) -> bytes:
    """Return a part of a file, read as `retry_read` does; it is shorter where the file ends."""

    def read() -> bytes:
        # Opened for each read: a descriptor for each of ImageNet's 1,064 shards would exceed the
        # usual limit of 1,024.
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    return retry_read(path, read)


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


def own_file(path: Path, option: str = "--output") -> Path:
    """Create the folder of ``path`` and return ``path``; raise `UserError` if it cannot be written.

    ``option`` chose the path. Refuses a link, which in a stranger's run may lead to any file of
    ours, and a pipe, which waits for a reader.
    """
    folder = path.parent
    remedy = f"choose another place with {option}"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"{path}: a link, or not a regular file; remove it, or {remedy}")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder.is_dir() and os.access(path if path.exists() else folder, os.W_OK)):
        raise UserError(f"{path}: cannot be written; {remedy}")
    return path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `UserError` if ``path`` cannot be written within the context, as on a full disk."""
    try:
        yield
    except OSError as error:
        # NumPy's has no `strerror`.
        raise UserError(
            f"{path}: cannot be written ({error.strerror or error}); free space or choose another "
            "place"
        ) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file beside ``path`` to write, which then replaces it.

    If it cannot be written, ``path`` stays as it was. Raises `UserError` as `own_file` and
    `writing`.
    """
    # The suffix stays: some writers take the format from it.
    partial = own_file(path).with_name(f".partial-{path.name}")
    try:
        with writing(path):
            partial.unlink(missing_ok=True)  # a stranger's may be a link, as in `own_file`
            yield partial
            sync(partial)  # Where the disk is remote, a full one may show here.
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def plain_cell(value: object) -> object:
    """Return a cell of a CSV file: a text that a spreadsheet would compute gets an apostrophe."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@"))
    return f"'{value}" if is_formula else value


def write_csv(rows: Sequence[Values], path: Path) -> None:
    """Write the rows under a header, as `plain_cell`."""
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        # csv ends lines with CRLF by default.
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: plain_cell(value) for name, value in row.items()})


def sha256_of(path: Path, most: float = math.inf) -> str:
    """Return the checksum, in hexadecimal, of a file that `regular_size` takes.

    A sparse file may claim any size, and would be read for ever.
    """
    regular_size(path, most)

    def digest() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return retry_read(path, digest)


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
