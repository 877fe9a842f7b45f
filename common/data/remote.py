"""Archives of data sets: download and unpack them."""

import shutil
import zipfile
from pathlib import Path

from common.errors import UserError
from common.files import folder_lock, md5_of

TIMEOUT = 30.0  # seconds without a byte
RETRIES = 3  # after pauses of 1, 2 and 3 seconds


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
