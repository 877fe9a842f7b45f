"""List and read the images of a source: class folders, with or without splits, or ImageNet's own layout."""

import csv
import itertools
from dataclasses import dataclass
from pathlib import Path

from common.data.image_folder import (
    MAX_PIXELS,
    Files,
    check_class_names,
    file_state,
    list_classes,
    list_files,
    list_folders,
    split_by_class,
)
from common.errors import UserError
from common.files import fingerprint_of, read_bytes, read_text
from imagenet_dali.images import BadImageError

EVALUATION_FOLDERS = ("val", "validation", "test")
SYNSET_LABELS = "imagenet_2012_validation_synset_labels.txt"  # TensorFlow: a synset a line, in the order of the files
KAGGLE_LABELS = "LOC_val_solution.csv"  # Kaggle: ImageId,PredictionString; the first word of the second is the synset
SYNSET_NAMES = ("LOC_synset_mapping.txt", "imagenet_metadata.txt")  # a synset and its words a line

MAX_BYTES = 4 * MAX_PIXELS + (1 << 20)  # four channels without compression, and metadata


@dataclass(frozen=True)
class Source:
    """The images of each split, sorted by path, and one name for each label."""

    root: Path
    class_names: list[str]
    splits: dict[str, Files]

    @property
    def fingerprint(self) -> str:
        """A checksum over the names, labels, sizes and times of the images, without reading them."""
        files = sorted(itertools.chain(*self.splits.values()))
        described = ((*file, *file_state(self.root / file[0])) for file in files)
        return fingerprint_of([*self.class_names, *itertools.chain.from_iterable(described)])


def list_source(root: Path, validation_share: float | None = None, seed: int = 0) -> Source:
    """Find every image below `root`; raise `UserError` if the folder has none of the layouts.

    Layouts: ``<class>/*``; ``train/<class>/*`` with ``{val,validation,test}/<class>/*``; ImageNet's
    ``train/<synset>/*`` with a flat ``val/*`` and either file of validation labels. Labels number the sorted class
    folders from 0, as in torchvision's ImageFolder. Without an evaluation folder `validation_share` of each class,
    chosen by `seed`, becomes the validation split (default 0.2).
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; SOURCE is a folder of images, SOURCE/<class>/*")
    has_train = (root / "train").is_dir() and bool(list_folders(root / "train"))
    train = root / "train" if has_train else root
    classes = list_folders(train)
    if len(classes) < 2:
        hint = f"; is {train / classes[0]} the folder you mean?" if classes else ""
        raise UserError(f"{train}: {len(classes)} class folders, at least 2 are needed, as {train}/<class>/*{hint}")
    splits = {"train": _list_classes(root, train, classes)}
    if empty := set(range(len(classes))) - {label for _, label in splits["train"]}:
        raise UserError(f"{train / classes[min(empty)]}: no images; remove the folder or fill it")
    evaluation = next((root / name for name in EVALUATION_FOLDERS if has_train and (root / name).is_dir()), None)
    if evaluation is None:
        splits = _split(splits["train"], 0.2 if validation_share is None else validation_share, seed)
    elif validation_share is not None:
        raise UserError(f"--validation-share={validation_share}: {evaluation} is the validation split already; drop it")
    elif list_folders(evaluation):
        splits["validation"] = _list_classes(root, evaluation, classes)
    else:
        splits["validation"] = _list_flat(root, evaluation, classes)
    return Source(root, _class_names(root, classes), splits)


def read_image(root: Path, filename: str) -> bytes:
    """Return the content of one of a source's images; raise `BadImageError` if it cannot be an image."""
    path = root / filename
    if path.is_symlink() and not path.exists():
        raise BadImageError("a link to nothing")
    try:
        return read_bytes(path, MAX_BYTES)
    except UserError as error:
        raise BadImageError(str(error).removeprefix(f"{path}: ")) from error


def _list_classes(root: Path, folder: Path, classes: list[str]) -> Files:
    unknown = sorted(set(list_folders(folder)) - set(classes))
    if unknown:
        raise UserError(f"{folder / unknown[0]}: this class has no training images; remove it or add them")
    return list_classes(root, folder, classes)


def _list_flat(root: Path, folder: Path, classes: list[str]) -> Files:
    """Label the files of a flat folder by the first of the two label files found."""
    files = list_files(folder)
    if not files:
        raise UserError(f"{folder}: no images; remove the folder or fill it")
    if path := _find(root, KAGGLE_LABELS):
        try:
            rows = csv.DictReader(read_text(path).splitlines())
            synsets = {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}
        except (KeyError, IndexError, AttributeError, csv.Error) as error:
            raise UserError(f"{path}: not Kaggle's table of ImageId and PredictionString") from error
    elif path := _find(root, SYNSET_LABELS):
        lines = read_text(path).split()
        if len(lines) != len(files):
            raise UserError(f"{path}: {len(lines)} labels for {len(files)} files in {folder}; complete the download")
        synsets = dict(zip((file.stem for file in files), lines, strict=True))
    else:
        raise UserError(f"{folder}: no class folders; put {SYNSET_LABELS} or {KAGGLE_LABELS} into {root}")
    labels = {name: label for label, name in enumerate(classes)}
    listed = []
    for file in files:
        synset = synsets.get(file.stem)
        if synset not in labels:
            raise UserError(f"{path}: {file.name} has label {synset}, which is no folder of {root / 'train'}")
        listed.append((file.relative_to(root).as_posix(), labels[synset]))
    return listed


def _find(root: Path, name: str) -> Path | None:
    # Kaggle's archive keeps its text files three levels above the images: ILSVRC/Data/CLS-LOC.
    folders = (root, *(root / folder for folder in EVALUATION_FOLDERS), *root.resolve().parents[:3])
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _class_names(root: Path, classes: list[str]) -> list[str]:
    path = next(filter(None, (_find(root, name) for name in SYNSET_NAMES)), None)
    if path is None:
        return classes
    words = dict(line.strip().split(maxsplit=1) for line in read_text(path).splitlines() if len(line.split()) > 1)
    names = [words.get(name, name) for name in classes]
    check_class_names(names, path)
    return names


def _split(files: Files, share: float, seed: int) -> dict[str, Files]:
    train, validation = split_by_class(files, share, seed)
    return {"train": train} | ({"validation": validation} if validation else {})
