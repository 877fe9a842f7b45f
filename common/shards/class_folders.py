"""List images in folders: class folders, and ImageNet's flat validation folder."""

from collections.abc import Mapping
from pathlib import Path

from common.data.image_folder import list_files, list_folders, list_splits
from common.errors import UserError
from common.shards.imagenet_tars import label_by_devkit
from common.shards.source import ImageListing

TINY_LABELS = "val_annotations.txt"  # Tiny ImageNet's: file, synset and box in a line


def list_class_folders(root: Path, folders: Mapping[str, Path], split: str | None) -> ImageListing:
    """List the class folders of train and validation, or of one `split`.

    The classes are those of train. A validation folder without class folders takes its labels from
    the devkit. Raises `UserError` for folders that hold no labelled images.
    """
    name = split or "validation"
    evaluation = folders.get(name)
    # Without a train folder the classes are those of the only split, or of the folder itself.
    labelled = {"train": folders.get("train", evaluation or root)}
    is_flat = False
    if evaluation:
        if (evaluation / TINY_LABELS).is_file():
            raise UserError(
                f"{evaluation / TINY_LABELS}: labels in a file; sort the images by it, in its "
                "folder: while read f c _; do mkdir -p $c; mv images/$f $c; done < "
                f"{TINY_LABELS}; rm -r images {TINY_LABELS}"
            )
        # ImageNet's validation images are such files; their labels are in the devkit.
        is_flat = name == "validation" and not list_folders(evaluation)
        if not is_flat:
            labelled[name] = evaluation
    ignored: list[Path] = []
    classes, splits = list_splits(root, labelled, ignored, is_training=not split)
    if evaluation and is_flat:
        files = [path.relative_to(root).as_posix() for path in list_files(evaluation)]
        splits[name], classes = label_by_devkit(root, evaluation, files, classes)
    # The whole folder, listed as train, is the split.
    if split and not evaluation:
        splits = {split: splits["train"]}
    return ImageListing(root, classes, splits, ignored=ignored)
