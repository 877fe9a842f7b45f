"""Find the labelled images of a source: class folders, ImageNet, WebDataset tars, Hugging Face
parquet files.
"""

import io
import itertools
import json
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from common.data.image_folder import (
    SPLIT_NAME,
    SPLITS,
    Files,
    check_class_names,
    file_state,
    find_splits,
    list_files,
    list_folders,
    list_splits,
    split_by_class,
)
from common.errors import UserError, counted, first_line, printable
from common.files import canonical_name, fingerprint_of
from imagenet_dali.dataset import LABELS, read_labels

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

VALIDATION_SHARE = 0.2
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "tif", "tiff")  # in WebDataset tars
TRAIN_TAR, VALIDATION_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
TINY_LABELS = "val_annotations.txt"  # of Tiny ImageNet: file, synset and box in a line
# the number of each validation image's class, and the synset of each number
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"


class Place(NamedTuple):
    """Where an image is: the first byte and the size in a tar, the row group and the row in it in a
    parquet file.
    """

    container: str  # path relative to the source's root
    start: int
    size: int

    @property
    def is_row(self) -> bool:
        """Whether the image is in a parquet file."""
        return self.container.endswith(".parquet")


Listing = list[tuple[str, int, Place]]  # name, label and place of each image of a container


@dataclass(frozen=True)
class Source:
    """The images of each split, one name for each label, and where the images are that are no files
    themselves.

    ``validation`` says where the validation images come from, and ``held_out`` which share of train
    they are and how it was drawn, if they are. ``ignored`` are files that have no image's name.
    """

    root: Path
    class_names: list[str]
    splits: dict[str, Files]
    places: Mapping[str, Place] = field(default_factory=dict)
    validation: str = ""
    held_out: str = ""
    ignored: Sequence[Path] = ()

    @property
    def summary(self) -> str:
        """The number of classes, the first names, their images, and the ignored files."""
        split, files = next(iter(self.splits.items()))
        counts = Counter(label for _, label in files)
        each = [counts[label] for label in range(len(self.class_names))]
        names = ", ".join(self.class_names[:3]) + (", ..." if len(each) > 3 else "")
        count = f"{min(each)} to {max(each)}" if min(each) < max(each) else f"{min(each)}"
        found = f"{len(each)} classes ({names}), {count} {split} images each"
        if self.ignored:
            found += f"; {counted(len(self.ignored), 'file')} ignored, such as {self.ignored[0]}"
        return f"{self.root}: {found}"

    @property
    def fingerprint(self) -> str:
        """A checksum over the names, labels, sizes and times of the images, without reading
        them.
        """
        files = sorted(itertools.chain(*self.splits.values()))
        described = (
            (*file, *(self.places.get(file[0]) or file_state(self.root / file[0])))
            for file in files
        )
        containers = sorted({place.container for place in self.places.values()})
        states = itertools.chain.from_iterable(file_state(self.root / name) for name in containers)
        return fingerprint_of(
            [*self.class_names, *itertools.chain.from_iterable(described), *states]
        )


def list_source(
    root: Path,
    validation_share: float | None = None,
    split: str | None = None,
    *,
    by_count: bool = False,
) -> Source:
    """Find the images for training and validation below `root`, or those of one `split`: of a
    folder without, all.

    Layouts: those in docs/own-images.md. Labels number the sorted class folders from 0, as in
    torchvision. Without a validation split `validation_share` of each class becomes it, by name, or
    `by_count` as in earlier versions. Raises `UserError` if the folder has none of the layouts.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; SOURCE is a folder of images, SOURCE/<class>/*")
    folders, containers = find_splits(root), _find_containers(root)
    archived = {_split_of(container): root / container for container in containers}
    if (root / TRAIN_TAR).is_file():
        archived.pop("test", None)  # its labels are not published
    others = [name for name in list_folders(root) if not SPLIT_NAME.fullmatch(name)]
    is_folder = folders or len({*others} - {"data"}) > 1 or not containers
    present = (folders or {"": root}) if is_folder else archived
    for name in ("train", "validation") if is_folder else ():
        if name in archived and name not in (folders or ["train"]):
            raise UserError(
                f"{archived[name]}: the {name} split in an archive, beside folders; unpack it into "
                f"{root / name}, or move it away"
            )
    if present.keys().isdisjoint({split or "train", ""}):
        raise UserError(
            f"{root}: no {split or 'train'} split, only {', '.join(present)}; name it with --split"
        )
    if is_folder:
        source = _list_folder(root, folders, split)
    elif (root / TRAIN_TAR).is_file():
        source = _list_imagenet_tars(root)
    else:
        source = _list_containers(root, containers, split)
    check_class_names(source.class_names, root)
    unused = ""
    if "test" in present and not split:
        unused = "; test is left out, prepare and evaluate take --split test"
    name = split or "validation"
    if name not in source.splits:
        share = VALIDATION_SHARE if validation_share is None else validation_share
        return _hold_out(source, share, unused, by_count=by_count)
    if validation_share is not None:
        raise UserError(
            f"--validation-share={validation_share}: {root} has a validation split already; drop it"
        )
    place = "the whole folder" if "" in present else f"the {name} split"
    if folders:
        place = f"{folders[name].name}/"
    splits = {name: source.splits[name]} if split else source.splits
    return replace(source, splits=splits, validation=place + unused)


def _hold_out(source: Source, share: float, unused: str, *, by_count: bool) -> Source:
    """Make a share of each class of train the validation split."""
    if not share:
        return replace(source, validation="none, as --validation-share=0")
    names = None if by_count else source.class_names
    train, validation = split_by_class(source.splits["train"], share, names)
    if not validation:
        raise UserError(
            f"{source.root}: no class has images enough to hold {share:.0%} out for validation; "
            "add some, so that one has two, or sort them into train/<class>/* and val/<class>/*"
        )
    total = len(train) + len(validation)
    how = "count" if by_count else "file name"
    return replace(
        source,
        splits={"train": train, "validation": validation},
        validation=f"{len(validation):,} of {total:,} images, about {share:.0%} of each class, "
        f"held out of train by {how}{unused}",
        held_out=f"{share:g} by {how}",
    )


def _list_folder(root: Path, folders: Mapping[str, Path], split: str | None) -> Source:
    """List class folders, and files beside which there are the devkit's labels; the classes are
    those of train.
    """
    name = split or "validation"
    evaluation = folders.get(name)
    train = folders.get("train", evaluation or root)
    is_flat = evaluation and name == "validation" and not list_folders(evaluation)
    if evaluation and (evaluation / TINY_LABELS).is_file():
        raise UserError(
            f"{evaluation / TINY_LABELS}: labels in a file; sort the images by it, in its folder: "
            f"while read f c _; do mkdir -p $c; mv images/$f $c; done < {TINY_LABELS}; rm -r "
            f"images {TINY_LABELS}"
        )
    labelled = {"train": train} | ({name: evaluation} if evaluation and not is_flat else {})
    ignored: list[Path] = []
    classes, splits = list_splits(root, labelled, ignored, is_training=not split)
    if evaluation and is_flat:
        files = [path.relative_to(root).as_posix() for path in list_files(evaluation)]
        splits[name], classes = _label_flat(root, evaluation, files, classes)
    if split and not evaluation:
        splits = {split: splits["train"]}
    return Source(root, classes, splits, ignored=ignored)


def _list_imagenet_tars(root: Path) -> Source:
    """List the training tar, which holds a tar for each class, and the flat one of validation."""
    by_class, places, flat = {}, {}, []
    for outer, _ in _tar_members(root / TRAIN_TAR):
        folder = f"train/{PurePosixPath(outer.name).stem}"
        by_class[folder] = []
        for member, _ in _tar_members(root / TRAIN_TAR, outer.offset_data):
            by_class[folder].append(name := f"{folder}/{member.name}")
            places[name] = Place(TRAIN_TAR, member.offset_data, member.size)
    if (root / VALIDATION_TAR).is_file():
        for member, _ in _tar_members(root / VALIDATION_TAR):
            flat.append(name := f"val/{member.name}")
            places[name] = Place(VALIDATION_TAR, member.offset_data, member.size)
    classes = [folder.removeprefix("train/") for folder in sorted(by_class)]
    splits = {
        "train": [
            (name, label)
            for label, folder in enumerate(sorted(by_class))
            for name in by_class[folder]
        ]
    }
    if flat:
        splits["validation"], classes = _label_flat(
            root, root / VALIDATION_TAR, sorted(flat), classes
        )
    return Source(root, classes, splits, places)


def _label_flat(
    root: Path, folder: Path, files: list[str], classes: list[str]
) -> tuple[Files, list[str]]:
    """Label the sorted files of a flat folder or tar by the devkit; return also the names of the
    classes.
    """
    from scipy.io import loadmat

    if not (path := root / DEVKIT).is_file():
        raise UserError(f"{folder}: no class folders; put {DEVKIT} into {root}")
    try:
        with tarfile.open(path) as tar:
            content = {
                PurePosixPath(member.name).name: tar.extractfile(member)
                for member in tar
                if member.isreg()
            }
            truth = content["ILSVRC2012_validation_ground_truth.txt"].read()  # pyright: ignore[reportOptionalMemberAccess]
            table = loadmat(io.BytesIO(content["meta.mat"].read()), squeeze_me=True)["synsets"]  # pyright: ignore[reportOptionalMemberAccess]
    except Exception as error:  # of a damaged archive, a dozen unrelated types
        raise UserError(f"{path}: {first_line(error)}; download it again") from error
    numbers = [int(line) for line in truth.split()]
    if len(numbers) != len(files):
        raise UserError(
            f"{path}: {len(numbers)} labels for {len(files)} files in {folder}; complete the "
            "download"
        )
    names, words = table["WNID"].tolist(), table["words"].tolist()
    synsets = dict(zip(table["ILSVRC2012_ID"].tolist(), names, strict=True))
    labels = {name: label for label, name in enumerate(classes)}
    if missing := {synsets[number] for number in numbers} - set(labels):
        raise UserError(
            f"{path}: {min(missing)} is no class of the training images; complete the download"
        )
    listed = [(file, labels[synsets[number]]) for file, number in zip(files, numbers, strict=True)]
    by_name = dict(zip(names, words, strict=True))
    return listed, [by_name.get(name, name) for name in classes]


def _find_containers(root: Path) -> list[str]:
    """Return the parquet files or else the tars of a source, by their paths from `root`."""
    for suffix in (".parquet", ".tar", ".tar.gz"):  # the last is refused when it is listed
        paths = itertools.chain(root.glob(f"*{suffix}"), root.glob(f"*/*{suffix}"))
        if found := sorted(path.relative_to(root).as_posix() for path in paths):
            return found
    return []


def _list_containers(root: Path, containers: list[str], split: str | None) -> Source:
    """List tars and parquet files; a word in a path names the split; where none does, all is for
    training.
    """
    by_split = defaultdict(list)
    for container in containers:
        by_split[_split_of(container)].append(container)
    if by_split.keys() > {""}:
        raise UserError(
            f"{root / by_split[''][0]}: its path names no split, as the others do; rename it"
        )
    wanted = [split or "train", *(["validation"] if not split and "validation" in by_split else [])]
    chosen = {name: by_split.get("") or by_split.get(name, []) for name in wanted}
    found: dict[str, Listing] = {}
    class_names = read_labels(root / LABELS) if (root / LABELS).is_file() else None
    columns = ""
    for container in itertools.chain(*chosen.values()):
        if container.endswith(".parquet"):
            found[container], names, taken = _list_parquet(root, container)
            if taken != columns:
                print(f"{printable(root / container)}: {taken}")
                columns = taken
            if names and class_names not in (None, names):
                raise UserError(
                    f"{root / container}: its class names are not those of labels.txt or an "
                    "earlier file: equalise them"
                )
            class_names = names or class_names
        else:
            found[container] = _list_webdataset(root, container)
    images = list(itertools.chain(*found.values()))
    if len({name for name, _, _ in images}) < len(images):
        for (
            file,
            listing,
        ) in found.items():  # of the same name in other folders, or numbered in each container
            found[file] = [
                (f"{file}/{n}/{name}", label, place)
                for n, (name, label, place) in enumerate(listing)
            ]
    splits = {}
    for split, members in chosen.items():
        splits[split] = sorted((name, label) for file in members for name, label, _ in found[file])
        if not splits[split]:
            raise UserError(
                f"{root}: no labelled images for the split {split} in {', '.join(containers[:3])}"
            )
    if class_names is None:
        present = {label for _, label in splits[wanted[0]]}
        class_names = [str(label) for label in range(len(present))]
        if present != set(range(len(present))):
            raise UserError(
                f"{root}: labels {min(present)} to {max(present)} with gaps; name all in "
                f"{root / LABELS}"
            )
    for file, listing in found.items():
        for name, label, _ in listing:
            if not 0 <= label < len(class_names):
                raise UserError(
                    f"{root / file}: {name}: label {label}, out of range for {len(class_names)} "
                    "classes"
                )
    return Source(
        root,
        class_names,
        splits,
        {name: place for each in found.values() for name, _, place in each},
    )


def _split_of(container: str) -> str:
    """Return the split that a word of a path names, or ""."""
    matches = map(SPLIT_NAME.fullmatch, re.split(r"[^a-z]+", container.lower()))
    return next((SPLITS[match[1]] for match in matches if match), "")


def _tar_members(path: Path, start: int = 0) -> Iterator[tuple[tarfile.TarInfo, BinaryIO]]:
    """Yield each regular member of a tar, which may begin within a file, and the open file.

    Raises `UserError` naming the member at which the tar is truncated or damaged, for which tarfile
    just ends.
    """
    name = "its first member"
    with path.open("rb") as file:
        file.seek(start)
        try:
            tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
            for member in tar:
                name = member.name
                if member.isreg():
                    yield member, file
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError
        except tarfile.TarError as error:
            raise UserError(
                f"{path}: compressed, truncated or damaged at {name}; run gunzip on it, or "
                "download it again"
            ) from error


def _list_webdataset(root: Path, container: str) -> Listing:
    """Return the images of a tar in which ``key.cls`` holds the label of ``key.jpg``, one for each
    key.

    Of several images of a key, it is that of the first of `IMAGE_SUFFIXES`, as of webdataset's
    ``"jpg;jpeg;png"``.
    """
    path, images, labels = root / container, {}, {}
    for member, file in _tar_members(path):
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.lower().partition(".")
        key = f"{folder}/{base[: len(stem)]}"
        if suffix in IMAGE_SUFFIXES:
            image = (
                IMAGE_SUFFIXES.index(suffix),
                member.name,
                Place(container, member.offset_data, member.size),
            )
            images[key] = min(image, images.get(key, image))
        elif suffix == "cls":
            file.seek(member.offset_data)
            with suppress(ValueError):
                labels[key] = int(file.read(member.size))
    if unlabelled := [name for key, (_, name, _) in images.items() if key not in labels]:
        raise UserError(
            f"{path}: {unlabelled[0]}: no label; its sample needs a class number in a .cls"
        )
    return [(name, labels[key], place) for key, (_, name, place) in images.items()]


def _list_parquet(root: Path, container: str) -> tuple[Listing, list[str], str]:
    """Return the images of a parquet file, the names of its classes and which columns were taken.

    Without a path a row's number is its name.
    """
    path, found = root / container, []
    with _open_parquet(path) as (file, image, label_column, class_names):
        for group in range(file.num_row_groups):
            rows = file.read_row_group(
                group, [label_column, f"{image}.path"], use_threads=False
            ).to_pylist()
            for row, content in enumerate(rows):
                name, label = (
                    (content[image] or {}).get("path") or f"{container}/{len(found)}",
                    content[label_column],
                )
                if label is None:
                    raise UserError(
                        f"{path}: {name}: row {len(found)} has no label; remove it or add one"
                    )
                found.append((name, label, Place(container, group, row)))
    return found, class_names, printable(f"images of column {image}, labels of {label_column}")


def read_rows(root: Path, places: Iterable[Place]) -> dict[Place, bytes]:
    """Return the images at ``places``; each row group is read once, since it is compressed as a
    whole.
    """
    groups = defaultdict(list)
    for place in places:
        groups[place.container, place.start].append(place)
    images = {}
    for (container, group), members in sorted(groups.items()):
        with _open_parquet(root / container) as (file, image, _, _):
            column = file.read_row_group(group, [f"{image}.bytes"], use_threads=False)[image]
            images |= {place: column[place.size]["bytes"].as_py() or b"" for place in members}
    return images


@contextmanager
def _open_parquet(path: Path) -> Iterator[tuple["ParquetFile", str, str, list[str]]]:
    """Yield a file, its columns of images and of labels, and its class names."""
    import pyarrow.parquet
    from pyarrow.types import is_integer, is_struct

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, features = file.schema_arrow, {}
            if b"huggingface" in (schema.metadata or {}):
                features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
            structs = [each for each in schema if is_struct(each.type)]
            images = [
                each.name
                for each in structs
                if {"bytes", "path"} <= {field.name for field in each.type}
            ]
            images.sort(key=lambda name: name != "image")  # that before others, such as a mask
            numbers = [each.name for each in schema if is_integer(each.type)]
            labels = [
                name for name in numbers if name == "label" or "names" in features.get(name, {})
            ]
            labels.sort(key=lambda name: name != "label")  # that before others, such as an age
            if not images or not labels:
                found = ", ".join(schema.names)
                raise UserError(
                    f"{path}: columns {found}; a struct of bytes and path and an integer label are "
                    "needed"
                )
            names = features.get(labels[0], {}).get("names") or []
            yield file, images[0], labels[0], [*map(canonical_name, names)]
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: {first_line(error)}; download it again") from error
