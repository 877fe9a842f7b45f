"""Archives of data sets: download and unpack them."""

import shutil
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

from common.errors import UserError
from common.files import folder_lock
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

    Raises `UserError` for an archive that is damaged, lacks it, or has a member that could write
    outside of ``folder``.
    """
    unpacked = folder / f".{archive.name}.partial"
    try:
        _unpack(archive, unpacked)
        (folder / name).parent.mkdir(exist_ok=True)
        (unpacked / name).rename(folder / name)
    except Exception as error:  # of a damaged archive, a dozen unrelated types
        raise UserError(
            f"{archive}: {name} cannot be unpacked into {folder} ({first_line(error)}); "
            "check the free space, or remove the archive and download it again"
        ) from error
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip or tar; raise an error for a member with a path out of it, and for a link.

    torchvision's `extract_archive` before 0.27 writes wherever a member's path leads.
    """
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as members:
            for name in members.namelist():  # zipfile would drop ".." and a leading slash unsaid
                if name.startswith("/") or ".." in PurePosixPath(name).parts:
                    raise ValueError(f"{name!r} leads outside")
            members.extractall(folder)
        return
    with tarfile.open(archive) as members:
        members.extractall(folder, filter=_refuse_outside)


def _refuse_outside(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    # Tar's own filter strips a leading slash, and before Python 3.11.13 a chain of links evades it
    if member.name.startswith("/"):
        raise tarfile.AbsolutePathError(member)
    if member.issym() or member.islnk():
        raise tarfile.SpecialFileError(member)
    return tarfile.data_filter(member, folder)
