"""List ImageNet as it is downloaded: a tar of a tar for each class, a flat tar, and the devkit."""

import io
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from common.data.image_folder import Files
from common.errors import UserError
from common.shards.containers import tar_members
from common.shards.source import ImageListing, TarPosition
from common.text import first_line

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VALIDATION_TAR = "ILSVRC2012_img_val.tar"
# The number of each validation image's class, and the synset of each number.
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"


def list_imagenet_tars(root: Path) -> ImageListing:
    """List the training tar, and the validation tar if it is there."""
    positions = {}
    by_class: dict[str, list[str]] = {}
    for class_tar, _ in tar_members(root / TRAIN_TAR):
        synset = PurePosixPath(class_tar.name).stem
        by_class[synset] = []
        # A tar in the tar, without compression: images can be read in place.
        for member, _ in tar_members(root / TRAIN_TAR, class_tar.offset_data):
            name = f"train/{synset}/{member.name}"
            by_class[synset].append(name)
            positions[name] = TarPosition(TRAIN_TAR, member.offset_data, member.size)
    classes = sorted(by_class)
    train = [(name, label) for label, synset in enumerate(classes) for name in by_class[synset]]
    splits = {"train": train}
    flat = []
    if (root / VALIDATION_TAR).is_file():
        for member, _ in tar_members(root / VALIDATION_TAR):
            name = f"val/{member.name}"
            flat.append(name)
            positions[name] = TarPosition(VALIDATION_TAR, member.offset_data, member.size)
    if flat:
        # Sorted: the devkit's numbers are in the order of names, which a tar need not keep.
        labelled, classes = label_by_devkit(root, root / VALIDATION_TAR, sorted(flat), classes)
        splits["validation"] = labelled
    return ImageListing(root, classes, splits, positions)


def label_by_devkit(
    root: Path, folder: Path, files: list[str], classes: list[str]
) -> tuple[Files, list[str]]:
    """Label the sorted files of a flat folder or tar, and name the classes in words.

    ``classes`` are the synsets of train. Raises `UserError` for a devkit that does not fit.
    """
    path = root / DEVKIT
    if not path.is_file():
        raise UserError(f"{folder}: no class folders; put {DEVKIT} into {root}")
    truth, table = _read_devkit(path)
    # The file has a class number for each image, in the order of their names.
    numbers = [int(line) for line in truth.split()]
    if len(numbers) != len(files):
        raise UserError(
            f"{path}: {len(numbers)} labels for {len(files)} files in {folder}; complete the "
            "download"
        )
    synsets = dict(zip(table["ILSVRC2012_ID"].tolist(), table["WNID"].tolist(), strict=True))
    labels = {synset: label for label, synset in enumerate(classes)}
    missing = {synsets[number] for number in numbers} - set(labels)
    if missing:  # Its images would have no class to train.
        raise UserError(
            f"{path}: {min(missing)} is no class of the training images; complete the download"
        )
    listed = [(file, labels[synsets[number]]) for file, number in zip(files, numbers, strict=True)]
    # Only now: two synsets may have the same words, as "crane" is a bird and a machine.
    words = dict(zip(table["WNID"].tolist(), table["words"].tolist(), strict=True))
    return listed, [words.get(synset, synset) for synset in classes]


def _read_devkit(path: Path) -> tuple[bytes, Any]:
    """Return the file of the validation images' class numbers, and the table of all classes."""
    from scipy.io import loadmat

    try:
        with tarfile.open(path) as tar:
            content: dict[str, Any] = {
                PurePosixPath(member.name).name: tar.extractfile(member)
                for member in tar
                if member.isreg()
            }
            truth = content["ILSVRC2012_validation_ground_truth.txt"].read()
            matrices = loadmat(io.BytesIO(content["meta.mat"].read()), squeeze_me=True)
            return truth, matrices["synsets"]
    # A damaged archive raises a dozen unrelated types.
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # of storage
            raise
        raise UserError(f"{path}: {first_line(error)}; download it again") from error
