"""The labelled images of a source, and where in tars and parquet files they lie."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from common.data.image_folder import Files, file_state
from common.errors import UserError
from common.files import fingerprint_of
from common.text import counted


class TarPosition(NamedTuple):
    """Where an image lies in a tar."""

    container: str  # path relative to the source's root
    offset: int  # position of the first byte in the tar
    size: int


class RowPosition(NamedTuple):
    """Where an image lies in a parquet file."""

    container: str  # path relative to the source's root
    row_group: int
    row: int  # within the row group


Position = TarPosition | RowPosition


class LabelledImage(NamedTuple):
    """An image in a tar or parquet file."""

    name: str
    label: int
    position: Position


def check_split(root: Path, present: Mapping[str, object], split: str | None) -> None:
    """Raise `UserError` where no split is `split`, or train; one named "" is all."""
    if present.keys().isdisjoint({split or "train", ""}):
        raise UserError(
            f"{root}: no {split or 'train'} split, only {', '.join(present)}; name it with --split"
        )


@dataclass(frozen=True)
class ImageListing:
    """The images of each split, with one class name for each label.

    ``positions`` has the images that are not files themselves, by name. ``validation`` says where
    the validation images come from, and ``held_out`` which share of train they are and how it was
    drawn, if they are. ``ignored`` are files without an image's suffix, ``refused`` lines on rows
    of a table and images that do not match.
    """

    root: Path
    class_names: list[str]
    splits: dict[str, Files]
    positions: Mapping[str, Position] = field(default_factory=dict)
    validation: str = ""
    held_out: str = ""
    ignored: Sequence[Path] = ()
    refused: Sequence[str] = ()

    @property
    def summary(self) -> str:
        """The number of classes, the first names, their images, and the ignored files."""
        split, files = next(iter(self.splits.items()))
        counts = Counter(label for _, label in files)
        per_class = [counts[label] for label in range(len(self.class_names))]
        names = ", ".join(self.class_names[:3])
        if len(per_class) > 3:
            names += ", ..."
        count = f"{min(per_class)}"
        if max(per_class) > min(per_class):
            count += f" to {max(per_class)}"
        text = f"{self.root}: {len(per_class)} classes ({names}), {count} {split} images each"
        if self.ignored:
            text += f"; {counted(len(self.ignored), 'file')} ignored, such as {self.ignored[0]}"
        return text

    @property
    def fingerprint(self) -> str:
        """A checksum over names, labels, sizes and times of the images, which are not read."""
        parts: list[object] = [*self.class_names]
        # Sorted: the order in which a file system lists them must not count.
        for name, label in sorted(itertools.chain(*self.splits.values())):
            # A position tells its size. If the content of a container changes, its time does.
            state = self.positions.get(name) or file_state(self.root / name)
            parts += [name, label, *state]
        for container in sorted({position.container for position in self.positions.values()}):
            parts += file_state(self.root / container)
        return fingerprint_of(parts)
