"""Find the images of a folder that do not decode, once."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

from common.data.corrupt_images import MAX_BAD_SHARE, join_some, reason_of
from common.data.fingerprint import fingerprint_of
from common.data.image_folder import open_image
from common.errors import UserError, is_first_process
from common.files import folder_lock
from common.hardware import cores


def find_corrupt(folder: Path, paths: Sequence[str]) -> dict[str, str]:
    """Return ``{path: why}`` of the images, relative to ``folder``, that do not decode.

    The answer is kept beside the folder, if that can be written, until an image changes in size or date. Of several
    processes one decodes, and the others wait for it.
    """
    digest = fingerprint_of([*paths, *(_state(folder / path) for path in paths)])
    record = folder.with_name(f".{folder.name}.corrupt.json")
    is_writable = os.access(folder.parent, os.W_OK)
    with folder_lock(folder.parent, wait=True) if is_writable else nullcontext():
        known = _read(record)
        if known.get("digest") == digest:
            return known["corrupt"]
        with ThreadPoolExecutor(cores()) as pool:
            reasons = pool.map(lambda path: _why_corrupt(folder / path), paths)
            corrupt = {path: reason for path, reason in zip(paths, reasons, strict=True) if reason}
        if is_writable:
            partial = record.with_suffix(".partial")
            partial.write_text(json.dumps({"digest": digest, "corrupt": corrupt}))
            partial.replace(record)
    return corrupt


def report_corrupt(folder: Path, corrupt: Mapping[str, str], total: int) -> None:
    """Name corrupt images on stderr, once for all processes; raise `UserError` for more than `MAX_BAD_SHARE`."""
    if not corrupt:
        return
    named = join_some([f"{path} ({reason})" for path, reason in corrupt.items()])
    count = f"{folder}: {len(corrupt):,} of {total:,} images do not decode"
    if len(corrupt) > MAX_BAD_SHARE * total:
        raise UserError(f"{count}, more than {MAX_BAD_SHARE:.0%}: {named}; unpack the data set again")
    if is_first_process():
        print(f"{count} and are left out: {named}", file=sys.stderr)


def _read(record: Path) -> dict:
    try:
        return json.loads(record.read_text())
    except (OSError, ValueError):
        return {}


def _state(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:  # a link to nowhere: it will not decode either
        return None
    return status.st_size, status.st_mtime_ns


def _why_corrupt(path: Path) -> str | None:
    try:
        open_image(path.read_bytes())
    except Exception as error:  # Pillow's decoders answer corrupt files with a dozen unrelated types
        return reason_of(error)
    return None
