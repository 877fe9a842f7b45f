"""Find the labelled images of a source: class folders, ImageNet, WebDataset tars, Hugging Face parquet files."""

import io
import itertools
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from common.data.image_folder import (
    MAX_BYTES,
    Files,
    check_class_names,
    file_state,
    list_files,
    list_folders,
    list_splits,
    split_by_class,
)
from common.errors import UserError
from common.files import fingerprint_of, read_bytes, read_text
from imagenet_dali.containers import (
    CONTAINER_FOLDERS,
    EVALUATION_FOLDERS,
    Place,
    find_containers,
    list_containers,
    read_rows,
    tar_members,
)
from imagenet_dali.images import BadImageError

VALIDATION_SHARE = 0.2
TRAIN_TAR, VALIDATION_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"  # the number of each validation image's class, and the synset of each number
SYNSET_LABELS = "imagenet_2012_validation_synset_labels.txt"  # TensorFlow: a synset a line, in the order of the files
ROWS_IN_MEMORY = 1250  # images of parquet files that a worker holds


@dataclass(frozen=True)
class Source:
    """The images of each split, one name for each label, and where the images are that are no files themselves.

    ``others`` are the names of files that are ignored, because images have other suffixes.
    """

    root: Path
    class_names: list[str]
    splits: dict[str, Files]
    places: Mapping[str, Place] = field(default_factory=dict)
    others: Sequence[str] = ()

    @property
    def fingerprint(self) -> str:
        """A checksum over the names, labels, sizes and times of the images, without reading them."""
        files = sorted(itertools.chain(*self.splits.values()))
        described = ((*file, *(self.places.get(file[0]) or file_state(self.root / file[0]))) for file in files)
        containers = sorted({place.container for place in self.places.values()})
        states = itertools.chain.from_iterable(file_state(self.root / name) for name in containers)
        return fingerprint_of([*self.class_names, *itertools.chain.from_iterable(described), *states])


def list_source(root: Path, validation_share: float | None = None, seed: int = 0) -> Source:
    """Find every image below `root`; raise `UserError` if the folder has none of the layouts.

    Layouts: those in docs/own-images.md. Labels number the sorted class folders from 0, as in torchvision.
    Without an evaluation split `validation_share` of each class, chosen by `seed`, becomes the validation split.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; SOURCE is a folder of images, SOURCE/<class>/*")
    has_train = (root / "train").is_dir() and bool(list_folders(root / "train"))
    names = list_folders(root)
    classes = set(names) - set(CONTAINER_FOLDERS)
    if has_train or len(classes) > 1:
        source = _list_folder(root, root / "train" if has_train else root)
    elif (root / TRAIN_TAR).is_file():
        source = _list_imagenet_tars(root)
    elif containers := find_containers(root):
        source = Source(root, *list_containers(root, containers))
    elif not classes and len(names) > 1:
        raise UserError(f"{root}: {', '.join(names)} are splits, not classes; sort the images into train/<class>/*")
    else:
        source = _list_folder(root, root)
    check_class_names(source.class_names, root)
    if "validation" not in source.splits:
        share = VALIDATION_SHARE if validation_share is None else validation_share
        train, validation = split_by_class(source.splits["train"], share, seed)
        return replace(source, splits={"train": train} | ({"validation": validation} if validation else {}))
    if validation_share is not None:
        raise UserError(f"--validation-share={validation_share}: {root} has a validation split already; drop it")
    return source


def _list_folder(root: Path, train: Path) -> Source:
    others: list[str] = []
    evaluation = next((root / name for name in EVALUATION_FOLDERS if train != root and (root / name).is_dir()), None)
    is_flat = evaluation and not list_folders(evaluation)
    labelled = {"train": train} | ({"validation": evaluation} if evaluation and not is_flat else {})
    classes, splits = list_splits(root, labelled, others)
    if evaluation and is_flat:
        files = [path.relative_to(root).as_posix() for path in list_files(evaluation, others)]
        splits["validation"], classes = _label_flat(root, evaluation, files, classes)
    return Source(root, classes, splits, others=others)


def _list_imagenet_tars(root: Path) -> Source:
    """List the training tar, which holds a tar for each class, and the flat one of validation."""
    by_class, places, flat = {}, {}, []
    for outer, _ in tar_members(root / TRAIN_TAR):
        folder = f"train/{PurePosixPath(outer.name).stem}"
        by_class[folder] = []
        for member, _ in tar_members(root / TRAIN_TAR, outer.offset_data, outer.offset_data + outer.size):
            by_class[folder].append(name := f"{folder}/{member.name}")
            places[name] = Place(TRAIN_TAR, member.offset_data, member.size)
    if (root / VALIDATION_TAR).is_file():
        for member, _ in tar_members(root / VALIDATION_TAR):
            flat.append(name := f"val/{member.name}")
            places[name] = Place(VALIDATION_TAR, member.offset_data, member.size)
    if len(by_class) < 2 or not all(by_class.values()):
        raise UserError(f"{root / TRAIN_TAR}: a class without images, or a single class; download it again")
    classes = [folder.removeprefix("train/") for folder in sorted(by_class)]
    splits = {"train": [(name, label) for label, folder in enumerate(sorted(by_class)) for name in by_class[folder]]}
    if flat:
        splits["validation"], classes = _label_flat(root, root / VALIDATION_TAR, sorted(flat), classes)
    return Source(root, classes, splits, places)


def _label_flat(root: Path, folder: Path, files: list[str], classes: list[str]) -> tuple[Files, list[str]]:
    """Label the sorted files of a flat folder or tar; return also the names of the classes, which the devkit has."""
    words: Mapping[str, str] = {}
    if (path := root / DEVKIT).is_file():
        synsets, words = _read_devkit(path)
    elif (path := root / SYNSET_LABELS).is_file():
        synsets = read_text(path).split()
    else:
        raise UserError(f"{folder}: no class folders; put {DEVKIT} or {SYNSET_LABELS} into {root}")
    if len(synsets) != len(files):
        raise UserError(f"{path}: {len(synsets)} labels for {len(files)} files in {folder}; complete the download")
    labels = {name: label for label, name in enumerate(classes)}
    if unknown := set(synsets) - set(labels):
        raise UserError(f"{path}: {min(unknown)} is no class of the training images; complete the download")
    listed = [(file, labels[synset]) for file, synset in zip(files, synsets, strict=True)]
    return listed, [words.get(name, name) for name in classes]


def _read_devkit(path: Path) -> tuple[list[str], dict[str, str]]:
    """Return the synset of each of ImageNet's validation images, in order, and the words of each synset."""
    from scipy.io import loadmat

    with tarfile.open(path, "r:gz") as tar:
        content = {PurePosixPath(member.name).name: tar.extractfile(member) for member in tar if member.isreg()}
        truth = content["ILSVRC2012_validation_ground_truth.txt"].read()  # pyright: ignore[reportOptionalMemberAccess]
        table = loadmat(io.BytesIO(content["meta.mat"].read()), squeeze_me=True)["synsets"]  # pyright: ignore[reportOptionalMemberAccess]
    names = table["WNID"].tolist()
    synsets = dict(zip(table["ILSVRC2012_ID"].tolist(), names, strict=True))
    return [synsets[int(line)] for line in truth.split()], dict(zip(names, table["words"].tolist(), strict=True))


class ImageReader:
    """Read the images of a shard by their numbers; of parquet files `ROWS_IN_MEMORY` rows are read at once."""

    def __init__(self, root: Path, files: Files, places: Sequence[Place | None]) -> None:
        self.root, self.files, self.places = root, files, places
        self._rows: dict[Place, bytes] = {}

    def read(self, number: int) -> bytes:
        """Return the content of an image; raise `BadImageError` if it cannot be one."""
        place = self.places[number]
        if place is None:
            path = self.root / self.files[number][0]
            try:
                return read_bytes(path, MAX_BYTES)
            except UserError as error:
                raise BadImageError(str(error).removeprefix(f"{path}: ")) from error
        if place.is_row:
            if place not in self._rows:
                self._rows = read_rows(self.root, filter(None, self.places[number : number + ROWS_IN_MEMORY]))
            return self._rows.pop(place)
        if place.size > MAX_BYTES:
            raise BadImageError(f"{place.size:,} bytes are more than {MAX_BYTES:,}")
        with (self.root / place.container).open("rb") as tar:
            tar.seek(place.start)
            return tar.read(place.size)
