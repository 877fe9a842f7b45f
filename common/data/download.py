"""Archives of data sets: download and unpack them."""

import shutil
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.locks import folder_lock
from common.text import first_line


def fetch(
    path: Path,
    archive: Path,
    url: str,
    md5: str,
    allow_download: bool,
    needed: str,
    description: str,
) -> None:
    """Unpack ``path`` from ``archive``, which is downloaded first if ``allow_download``.

    The archive is in a folder above ``path``, and used only if its MD5 sum is ``md5``. If several
    processes of a machine call this at once, one does the work while the others wait. ``needed``
    and ``description`` tell the user what was looked for and what a download would get.
    """
    # The import takes a second, and few runs download.
    from torchvision.datasets.utils import check_integrity, download_url

    root = archive.parent
    if not allow_download and not check_integrity(archive, md5):
        fault = f"DATA.root={root} has no {needed}"
        if archive.is_file():
            fault = f"{archive}: its MD5 is not {md5}"
        raise UserError(f"{fault}: --set DATA.download=True fetches {description} into it")
    with folder_lock(root, wait=True):
        if path.exists():  # Another process was first.
            return
        try:
            download_url(url, root, archive.name, md5)
        # The errors of network, disk, protocol and checksum have no type in common.
        except Exception as error:
            raise UserError(
                f"{url}: {first_line(error)}; rerun the command, or download the file to {archive}"
            ) from error
        extract(archive, path.relative_to(root), root)


def extract(archive: Path, name: Path | str, folder: Path) -> None:
    """Unpack the folder or file ``name`` of a zip or tar as ``folder / name``.

    It appears only when it is whole. Raises `UserError` for an archive that is damaged, lacks it,
    or has a member outside of it (``../``).
    """
    unpacked = folder / f".{archive.name}.partial"
    # The filter keeps a tar's files inside the folder; zipfile does so for zips.
    options: dict[str, Any] = {} if archive.suffix == ".zip" else {"filter": "data"}
    try:
        shutil.unpack_archive(archive, unpacked, **options)
        (folder / name).parent.mkdir(exist_ok=True)
        (unpacked / name).rename(folder / name)
    # A damaged archive raises a dozen unrelated types.
    except Exception as error:
        raise UserError(
            f"{archive}: {name} cannot be unpacked into {folder} ({first_line(error)}); "
            "check the free space, or remove the archive and download it again"
        ) from error
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
