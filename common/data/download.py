"""Archives of data sets: download and unpack them."""

import shutil
from pathlib import Path

from common.errors import UserError, first_line
from common.files import folder_lock


def fetch(
    path: Path,
    archive: Path,
    url: str,
    md5: str,
    allow_download: bool,
    needed: str,
    description: str,
) -> None:
    """Unpack ``path`` from ``archive`` in a folder above it, after a download if ``DATA.download``
    is set.

    If several processes of a machine call this at once, one does the work while the others wait.
    ``needed`` and ``description`` tell the user what was looked for and what a download would get.
    """
    from torchvision.datasets.utils import (
        check_integrity,
        download_url,
    )  # takes a second, and few runs download

    root = archive.parent
    if not allow_download and not check_integrity(archive, md5):
        fault = (
            f"{archive}: its MD5 is not {md5}"
            if archive.is_file()
            else f"DATA.root={root} has no {needed}"
        )
        raise UserError(f"{fault}: --set DATA.download=True fetches {description} into it")
    with folder_lock(root, wait=True):
        if path.exists():  # another process was first
            return
        try:
            download_url(url, root, archive.name, md5)
        except Exception as error:  # of the network, the disk, the protocol or a wrong checksum
            raise UserError(
                f"{url}: {first_line(error)}; rerun the command, or download the file to {archive}"
            ) from error
        extract(archive, path.relative_to(root), root)


def extract(archive: Path, name: Path | str, folder: Path) -> None:
    """Unpack the archive's folder or file ``name`` as ``folder / name``, which appears only when it
    is whole.

    Raises `UserError` for an archive that is damaged, lacks it, or has a path or link that leads
    out of it.
    """
    from torchvision.datasets.utils import extract_archive

    unpacked = folder / f".{archive.name}.partial"
    try:
        extract_archive(archive, unpacked)
        (folder / name).parent.mkdir(exist_ok=True)
        (unpacked / name).rename(folder / name)
    except Exception as error:  # of a damaged archive, a dozen unrelated types
        raise UserError(
            f"{archive}: {name} cannot be unpacked into {folder} ({first_line(error)}); "
            "check the free space, or remove the archive and download it again"
        ) from error
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
