"""Images inside tar files: list them without reading them."""

import io
import tarfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from pydantic_core import from_json

from common.data.image_folder import MAX_BYTES
from common.errors import UserError, first_line
from common.files import MAX_TEXT, regular_size
from imagenet_dali.images import BadImageError

MAX_LABEL_BYTES = 1 << 20  # of a .cls or .json file; the rest is not read
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "tif", "tiff")


class Place(NamedTuple):
    """Where an image is: the first byte and the size in a tar, the row group and the row in it in a parquet file."""

    container: str  # path relative to the source's root
    start: int
    size: int

    @property
    def is_row(self) -> bool:
        """Whether the image is in a parquet file."""
        return self.container.endswith(".parquet")


Member = tuple[str, int, Place]  # name, label, place


class Places(Mapping[str, Place]):
    """The places of images by their names, in 28 bytes each beside the name: a tuple in a dict takes 200.

    ``parts`` are containers, the names of images in them, and the start and the size of each, int64 [N, 2].
    """

    def __init__(self, parts: Iterable[tuple[str, Sequence[str], np.ndarray]] = ()) -> None:
        parts = list(parts)
        self.containers = sorted({container for container, _, _ in parts})
        names = np.array([name for _, members, _ in parts for name in members], object)
        numbers = [self.containers.index(container) for container, _, _ in parts]
        order = np.argsort(names, kind="stable")
        self._names = names[order]
        self._numbers = np.repeat(np.array(numbers, np.int32), [len(members) for _, members, _ in parts])[order]
        self._spans = np.concatenate([np.empty((0, 2), np.int64), *(spans for _, _, spans in parts)])[order]

    def __getitem__(self, name: str) -> Place:
        at = bisect_left(self._names, name)
        if at == len(self) or self._names[at] != name:
            raise KeyError(name)
        return Place(self.containers[self._numbers[at]], *self._spans[at].tolist())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_member(file: BinaryIO, start: int, size: int) -> bytes:
    """Return ``size`` bytes of a file from ``start``; raise `BadImageError` if they cannot be an image."""
    if size > MAX_BYTES:
        raise BadImageError(f"{size:,} bytes are more than {MAX_BYTES:,}")
    file.seek(start)
    return file.read(size)


def tar_members(path: Path, start: int = 0, size: int | None = None) -> Iterator[tuple[tarfile.TarInfo, BinaryIO]]:
    """Yield each regular member of a tar, which may be a part of a file, and the open file.

    Raises `UserError` naming the member at which the tar is truncated or damaged.
    """
    end = start + (regular_size(path) if size is None else size)
    name = "its first member"
    with path.open("rb") as file:
        file.seek(start)
        try:
            tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
            while member := tar.next():
                tar.members.clear()  # a kilobyte each  # pyright: ignore[reportAttributeAccessIssue]
                name = member.name
                if member.offset_data + member.size > end:
                    raise tarfile.ReadError
                if member.isreg():
                    yield member, file
            file.seek(tar.offset)  # tarfile takes a damaged header for the end
            if tar.offset >= end or file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError
        except tarfile.TarError as error:
            file.seek(start)
            if file.read(2) == b"\x1f\x8b":
                raise UserError(
                    f"{path}: compressed, but its images are read in random order; run gunzip on it first"
                ) from error
            raise UserError(f"{path}: truncated or damaged at {name}; download it again") from error


def list_tar(task: tuple[Path, str, str, int, int | None]) -> tuple[str, tuple[str, list[str], np.ndarray]]:
    """Return ``folder`` and, as its files, the members of the tar at ``(root, container, folder, start, size)``.

    They are as in `Places`.
    """
    root, container, folder, start, size = task
    names, spans = [], []
    for member, _ in tar_members(root / container, start, size):
        names.append(f"{folder}/{member.name}")
        spans.append((member.offset_data, member.size))
    return folder, (container, names, np.array(spans, np.int64).reshape(-1, 2))


def list_webdataset(root: Path, container: str) -> list[Member]:
    """Return the images of a tar in which ``key.cls`` or ``key.json`` holds the label of ``key.jpg``."""
    path, images, labels = root / container, {}, {}
    for member, file in tar_members(path):
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.lower().partition(".")
        key = f"{folder}/{base[: len(stem)]}"
        if suffix in IMAGE_SUFFIXES:
            images[member.name] = key, Place(container, member.offset_data, member.size)
        elif suffix in ("cls", "json"):
            data = read_member(file, member.offset_data, min(member.size, MAX_LABEL_BYTES))
            labels[key, suffix] = _parse_label(path, member.name, suffix, data)
    found = []
    for name, (key, place) in images.items():
        label = labels.get((key, "cls"), labels.get((key, "json")))
        if label is None:
            raise UserError(f"{path}: {name}: no label; its sample needs a .cls, or a .json with the field label")
        found.append((name, label, place))
    return found


def _parse_label(path: Path, name: str, suffix: str, data: bytes) -> int | None:
    try:
        if suffix == "cls":
            return int(data)
        label = from_json(data).get("label")
    except (ValueError, AttributeError):
        label = data[:20].decode(errors="replace")
    if label is not None and type(label) is not int:
        raise UserError(f"{path}: {name}: label {label!r} is no class number; write one, counted from 0")
    return label


def read_devkit(path: Path) -> tuple[list[str], dict[str, str]]:
    """Return the synset of each of ImageNet's validation images, in order, and the words of each synset."""
    try:
        from scipy.io import loadmat

        with tarfile.open(path, "r:gz") as tar:
            files = {member.name.rpartition("/")[2]: member for member in tar if member.size <= MAX_TEXT}
            truth = tar.extractfile(files["ILSVRC2012_validation_ground_truth.txt"]).read()  # pyright: ignore[reportOptionalMemberAccess]
            mat = tar.extractfile(files["meta.mat"]).read()  # pyright: ignore[reportOptionalMemberAccess]
        table = loadmat(io.BytesIO(mat), squeeze_me=True)["synsets"]
        synsets = dict(zip(table["ILSVRC2012_ID"].tolist(), table["WNID"].tolist(), strict=True))
        words = dict(zip(table["WNID"].tolist(), table["words"].tolist(), strict=True))
        return [synsets[int(line)] for line in truth.split()], words
    except ImportError as error:
        raise UserError(f"{path}: reading it needs scipy: pip install scipy") from error
    except Exception as error:  # scipy raises many types for damaged files
        raise UserError(f"{path}: not ImageNet's devkit ({first_line(error)}); download it again") from error
