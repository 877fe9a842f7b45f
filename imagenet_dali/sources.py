"""List and read the images of a source: class folders, ImageNet as downloaded, WebDataset tars or parquet files."""

import csv
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
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
from imagenet_dali.containers import EVALUATION_FOLDERS, find_containers, list_containers
from imagenet_dali.images import BadImageError
from imagenet_dali.parquet_source import read_rows
from imagenet_dali.tar_source import Place, Places, list_tar, read_devkit, read_member, tar_members
from imagenet_dali.workers import parallel_map

VALIDATION_SHARE = 0.2
TRAIN_FOLDERS = ("train", "imagenet21k_train")
TRAIN_TAR, VALIDATION_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"  # the number of each validation image's class, and the synset of each number
SYNSET_LABELS = "imagenet_2012_validation_synset_labels.txt"  # TensorFlow: a synset a line, in the order of the files
KAGGLE_LABELS = "LOC_val_solution.csv"  # Kaggle: ImageId,PredictionString; the first word of the second is the synset
SYNSET_NAMES = ("LOC_synset_mapping.txt", "imagenet_metadata.txt")  # a synset and its words a line

ROWS_IN_MEMORY = 1250  # images of parquet files that a worker holds


@dataclass(frozen=True)
class Source:
    """The images of each split, one name for each label, and where the images are that are no files themselves.

    ``others`` are the names of files that are ignored, because images have other suffixes.
    """

    root: Path
    class_names: list[str]
    splits: dict[str, Files]
    places: Places = field(default_factory=Places)
    others: Sequence[str] = ()

    @property
    def fingerprint(self) -> str:
        """A checksum over the names, labels, sizes and times of the images, without reading them."""
        files = sorted(itertools.chain(*self.splits.values()))
        described = ((*file, *(self.places.get(file[0]) or file_state(self.root / file[0]))) for file in files)
        states = itertools.chain.from_iterable(file_state(self.root / name) for name in self.places.containers)
        return fingerprint_of([*self.class_names, *itertools.chain.from_iterable(described), *states])


def list_source(root: Path, validation_share: float | None = None, seed: int = 0, workers: int = 1) -> Source:
    """Find every image below `root`; raise `UserError` if the folder has none of the layouts.

    Layouts: ``<class>/*``; ``train/<class>/*`` with ``{val,validation,test}/<class>/*``; ImageNet's
    ``train/<synset>/*`` with a flat ``val/*`` and a file of validation labels, or its tars; ImageNet-21k-P's
    ``imagenet21k_{train,val}``; WebDataset tars or parquet files whose names tell the split. Labels number the sorted
    class folders from 0, as in torchvision's ImageFolder. Without an evaluation split `validation_share` of each class,
    chosen by `seed`, becomes the validation split. `workers` processes list tars and parquet files.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; SOURCE is a folder of images, SOURCE/<class>/*")
    folders = (root / name for name in TRAIN_FOLDERS)
    images = next((folder for folder in folders if folder.is_dir() and list_folders(folder)), root)
    names = list_folders(root)
    classes = set(names) - {"data", "train", *EVALUATION_FOLDERS}
    is_folder = images != root or len(classes) > 1
    if not is_folder and (root / TRAIN_TAR).is_file():
        source = _list_imagenet_tars(root, workers)
    elif not is_folder and (containers := find_containers(root)):
        class_names, splits, places = list_containers(root, containers, workers)
        source = Source(root, _class_names(root, class_names), splits, places)
    elif not is_folder and not classes and len(names) > 1:
        raise UserError(f"{root}: {', '.join(names)} are splits, not classes; sort the images into train/<class>/*")
    else:
        source = _list_folder(root, images)
    if "validation" not in source.splits:
        share = VALIDATION_SHARE if validation_share is None else validation_share
        train, validation = split_by_class(source.splits["train"], share, seed)
        return replace(source, splits={"train": train} | ({"validation": validation} if validation else {}))
    if validation_share is not None:
        raise UserError(f"--validation-share={validation_share}: {root} has a validation split already; drop it")
    return source


def read_images(root: Path, files: Files, places: Sequence[Place | None]) -> Iterator[Callable[[], bytes]]:
    """Yield for each image a function that returns its content, or raises `BadImageError` if it cannot be an image.

    Of parquet files `ROWS_IN_MEMORY` rows are held; a tar stays open until an image of another one follows.
    """
    with ExitStack() as stack:
        tar, rows = None, {}
        for number, ((filename, _), place) in enumerate(zip(files, places, strict=True)):
            if place is None:
                yield partial(read_image, root / filename)
            elif place.is_row:
                if place not in rows:
                    rows = read_rows(root, filter(None, places[number : number + ROWS_IN_MEMORY]))
                yield partial(rows.pop, place)
            else:
                if tar is None or tar.name != str(root / place.container):
                    stack.close()
                    tar = stack.enter_context((root / place.container).open("rb"))
                yield partial(read_member, tar, place.start, place.size)


def read_image(path: Path) -> bytes:
    """Return the content of an image file; raise `BadImageError` if it cannot be an image."""
    if path.is_symlink() and not path.exists():
        raise BadImageError("a link to nothing")
    try:
        return read_bytes(path, MAX_BYTES)
    except UserError as error:
        raise BadImageError(str(error).removeprefix(f"{path}: ")) from error


def _list_folder(root: Path, train: Path) -> Source:
    others: list[str] = []
    folders = (root / name for name in EVALUATION_FOLDERS if train != root and (root / name).is_dir())
    evaluation = next(folders, None)
    is_flat = evaluation and not list_folders(evaluation)
    labelled = {"train": train} | ({"validation": evaluation} if evaluation and not is_flat else {})
    classes, splits = list_splits(root, labelled, others)
    if evaluation and is_flat:
        files = [path.relative_to(root).as_posix() for path in list_files(evaluation, others)]
        splits["validation"] = _label_flat(root, evaluation, files, classes)
    return Source(root, _class_names(root, classes), splits, others=others)


def _list_imagenet_tars(root: Path, workers: int) -> Source:
    """List the training tar, which holds a tar for each class, and the flat one of validation."""
    tasks: list[tuple[Path, str, str, int, int | None]] = []
    for member, _ in tar_members(root / TRAIN_TAR):
        name = PurePosixPath(member.name)
        if name.suffix != ".tar":
            raise UserError(f"{root / TRAIN_TAR}: {member.name}: not the tar of a class; download it again")
        tasks.append((root, TRAIN_TAR, f"train/{name.stem}", member.offset_data, member.size))
    if (root / VALIDATION_TAR).is_file():
        tasks.append((root, VALIDATION_TAR, "val", 0, None))
    found = dict(parallel_map(list_tar, tasks, min(workers, len(tasks))))
    places = Places(found.values())
    _, flat, _ = found.pop("val", ("", [], None))
    for folder, (_, files, _) in found.items():
        if not files or len(found) < 2:
            raise UserError(f"{root / TRAIN_TAR}: {folder}: no images, or the only class; download it again")
    splits = {
        "train": [(name, label) for label, folder in enumerate(sorted(found)) for name in sorted(found[folder][1])]
    }
    classes = [folder.removeprefix("train/") for folder in sorted(found)]
    if flat:
        splits["validation"] = _label_flat(root, root / VALIDATION_TAR, sorted(flat), classes)
    return Source(root, _class_names(root, classes), splits, places)


def _label_flat(root: Path, folder: Path, files: list[str], classes: list[str]) -> Files:
    """Label the sorted files of a flat folder or tar by the first of the label files found."""
    if not files:
        raise UserError(f"{folder}: no images; remove the folder or fill it")
    if path := _find(root, KAGGLE_LABELS):
        try:
            rows = csv.DictReader(read_text(path).splitlines())
            synsets = {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}
        except (KeyError, IndexError, AttributeError, csv.Error) as error:
            raise UserError(f"{path}: not Kaggle's table of ImageId and PredictionString") from error
    elif path := _find(root, SYNSET_LABELS) or _find(root, DEVKIT):
        lines = read_devkit(path)[0] if path.name == DEVKIT else read_text(path).split()
        if len(lines) != len(files):
            raise UserError(f"{path}: {len(lines)} labels for {len(files)} files in {folder}; complete the download")
        synsets = dict(zip((Path(file).stem for file in files), lines, strict=True))
    else:
        raise UserError(f"{folder}: no class folders; put {SYNSET_LABELS}, {KAGGLE_LABELS} or {DEVKIT} into {root}")
    labels = {name: label for label, name in enumerate(classes)}
    listed = []
    for file in files:
        synset = synsets.get(Path(file).stem)
        if synset not in labels:
            raise UserError(f"{path}: {Path(file).name} has label {synset}, which is no class of the training images")
        listed.append((file, labels[synset]))
    return listed


def _find(root: Path, name: str) -> Path | None:
    # Kaggle's archive keeps its text files three levels above the images: ILSVRC/Data/CLS-LOC.
    folders = (root, *(root / folder for folder in EVALUATION_FOLDERS), *root.resolve().parents[:3])
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _class_names(root: Path, classes: list[str]) -> list[str]:
    path = next(filter(None, (_find(root, name) for name in SYNSET_NAMES)), None)
    if path is not None:
        words = dict(line.strip().split(maxsplit=1) for line in read_text(path).splitlines() if len(line.split()) > 1)
    else:
        path = _find(root, DEVKIT) or root
        words = read_devkit(path)[1] if path != root else {}
    names = [words.get(name, name) for name in classes]
    check_class_names(names, path)
    return names
