"""What a source of images implements (`ImageSplit`), and the source that is a folder of files."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from common.data.decoding import MAX_BYTES
from common.data.image_folder import Files, file_state
from common.errors import UserError
from common.files import fingerprint_of, read_bytes

# An encoded image and its label, or the error of a record that cannot be read.
Record = tuple[bytes | memoryview, int] | UserError


@dataclass(eq=False)
class ImageSplit(ABC):
    """The labelled images of one split of a data set, numbered from 0.

    A source of images implements `fingerprint`, `read` and `fault`, and passes to ``__init__`` what
    it knows of all images. With that it works with every loader but DALI's, which takes
    `TFRecordSplit` alone since it needs the image sizes before it decodes. A source that can read
    consecutive images at once (shards) also overrides `read_span`, `span_bytes` and `block_bounds`;
    it may then be read in blocks (DATA.order="blocks").

    Threads call the methods concurrently, and worker processes are forked with a copy of the split.
    """

    class_names: Sequence[str]  # one for each label, in the order of the labels
    labels: np.ndarray  # int [N], each image's, from 0
    description: str = ""  # where the images come from, in words for the user: "val/"
    # "0.2 by file name" if the validation images of the data set are such a share of its training
    # images.
    held_out: str = ""

    made_from = ""  # the folder that was prepared, if one was

    # Whether all images are RGB JPEGs, shown as stored whatever their EXIF orientation says.
    is_prepared = False

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def class_counts(self) -> list[int]:
        """The number of images of each class."""
        return np.bincount(self.labels, minlength=len(self.class_names)).tolist()

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A checksum over the content, wherever it lies; splits of one data set may share it."""

    @abstractmethod
    def read(self, index: int) -> tuple[bytes | memoryview, int]:
        """Return the encoded image, as in its file, and its label; raise `fault`'s error."""

    @abstractmethod
    def fault(self, index: int, reason: object) -> UserError:
        """Return the error that names an image which cannot be used, the reason and the remedy."""

    def name_image(self, index: int) -> str:
        """Return where an image lies, for people; may read it."""
        return f"image {index}"

    @property
    def is_shuffled(self) -> bool:
        """Whether consecutive images are of different classes; block order refuses others.

        Shards of other tools may be sorted by class.
        """
        # Too few images to tell.
        if len(self) < 100:
            return True
        equal_by_chance = np.square(np.bincount(self.labels) / len(self)).sum()
        # Sorted by class nearly all neighbours are equal: the limit is midway to chance.
        equal = np.mean(self.labels[1:] == self.labels[:-1])
        return bool(equal < (1 + equal_by_chance) / 2)  # NumPy's own would be "True" in config.json

    def read_span(self, first: int, end: int) -> list[Record]:
        """Return what `read` does for images ``first`` to ``end - 1`` of a block, read at once.

        Bad images are returned as errors.
        """
        raise NotImplementedError  # Sources without shards have no blocks.

    def span_bytes(self, first: int, end: int) -> int:
        """Return the bytes that `read_span` reads; 0 for a source that has no shards."""
        return 0

    def block_bounds(self, nbytes: int) -> np.ndarray | None:
        """Return the first image of each block, then N, int64 [blocks + 1]; None without shards.

        A block, or a part of it, is what `read_span` is asked for. It has about ``nbytes`` at most.
        """
        return None


class FolderSplit(ImageSplit):
    """Image files below ``root``, of any kind that `decode_image` takes."""

    def __init__(
        self,
        root: Path,
        class_names: Sequence[str],
        files: Files,
        description: str = "",
        held_out: str = "",
    ):
        labels = np.array([label for _, label in files], np.int64)
        super().__init__(class_names, labels, description, held_out)
        self.root = root
        # An array: forked workers would copy a list of a million strings page by page, because
        # counting references writes to each.
        self._paths = np.array([os.fsencode(path) for path, _ in files])

    def path(self, index: int) -> Path:
        """Return the path of an image."""
        return self.root / os.fsdecode(self._paths[index])

    def read(self, index: int) -> tuple[bytes, int]:
        path = self.path(index)
        try:
            return read_bytes(path, MAX_BYTES), int(self.labels[index])
        except UserError as error:
            raise self.fault(index, str(error).removeprefix(f"{path}: ")) from error

    def name_image(self, index: int) -> str:
        return str(self.path(index))

    def fault(self, index: int, reason: object) -> UserError:
        return UserError(f"{self.path(index)}: {reason}; remove or replace this image")

    @property
    def fingerprint(self) -> str:
        """A checksum over paths from ``root``, labels and sizes; the files are not read."""
        # Sorted: the order in which a file system lists them must not count.
        files = sorted(zip(map(os.fsdecode, self._paths), self.labels.tolist(), strict=True))
        described = (f"{label} {file_state(self.root / path)[0]} {path}" for path, label in files)
        return fingerprint_of(chain(self.class_names, described))
