"""Files: read with limits, checked against a schema, checksums and fsync."""

import contextlib
import csv
import hashlib
import math
import os
import stat
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import UserError
from common.text import printable

ROOT = Path(__file__).resolve().parents[1]  # the repository's folder
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
