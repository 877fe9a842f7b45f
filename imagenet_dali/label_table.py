"""List images by a table of paths and labels (CSV or TSV), as Kaggle and spreadsheets write it."""

import csv
import io
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.data.bad_images import MAX_BAD_SHARE
from common.data.image_folder import SPLIT_NAME, SPLITS, Files, list_files
from common.errors import UserError
from common.files import canonical_name, read_text
from common.launchers import is_first_process
from common.text import list_some, print_some, print_wrapped
from imagenet_dali.source import ImageListing, check_split

ROLES = ("path", "label", "split")
# of columns; where one has such a name, others that may be labels do not count
LABEL_NAMES = ("label", "labels", "class", "class_name", "category", "target")
MAX_TABLE = 1 << 30  # bytes; ten million rows fit

Rows = list[tuple[int, list[str]]]  # the line in the file, and the cells
BySplit = dict[str, dict[str, str]]  # class name by path; the split is "" without a column of it


@dataclass(frozen=True)
class LabelTable:
    """A table, its columns as "path=file,label=species", and how much of it may be wrong."""

    path: Path
    columns: str | None = None
    max_refused: float = MAX_BAD_SHARE


def list_table(root: Path, table: LabelTable, split: str | None) -> tuple[ImageListing, BySplit]:
    """List the images that have a row for train and validation, or one `split`; and all by split.

    Prints the columns and what is left out. Raises `UserError` for a table that cannot be read,
    unclear columns, rows and images beyond ``table.max_refused`` that do not match, and as
    `list_splits` does for classes.
    """
    names = [path.relative_to(root).as_posix() for path in list_files(root)]
    files: dict[str, str] = {}
    # without a suffix; the names are sorted, so that of 1.jpg and 1.png the first is taken
    for name in names:
        files.setdefault(_key(os.path.splitext(name)[0]), name)
    files |= {_key(name): name for name in names}
    header, rows = _read_rows(table.path, files)
    columns = _find_columns(table, header, rows, files)
    by_split, refused = _match(rows, len(header), columns, files)
    count = f"rows or images without a match: {len(refused):,}"
    if is_first_process():
        said = ", ".join(f"{role} in column {header[at]}" for role, at in columns.items())
        print_wrapped(f"{table.path}: {said}; {len(rows):,} rows; {count}")
        print_some(refused, 5)
    total = max(len(rows), len(names))
    if len(refused) > table.max_refused * total or not by_split:
        raise UserError(
            f"{table.path}: {count}, more than {100 * min(table.max_refused, 0.99):g}% of "
            f"{total:,}; mend the table, whose paths are relative to {root}, remove other images, "
            "or raise prepare's --max-refused"
        )
    check_split(root, by_split, split)
    class_names, splits = _number_classes(table.path, by_split, split)
    return ImageListing(root, class_names, splits, refused=refused), by_split


def _key(name: str) -> str:
    """Return a path as it compares, of Windows too."""
    return canonical_name(os.path.normpath(name.replace("\\", "/")))


def _read_rows(path: Path, files: Mapping[str, str]) -> tuple[list[str], Rows]:
    """Return the names of the columns, or their numbers, and the rows that are not empty."""
    text = read_text(path, MAX_TABLE).removeprefix("\ufeff")
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    lines = io.StringIO(text, newline="")
    # strict: a quote that is not closed would take in all that follows
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: {error}; mend it") from error
    if not rows:
        raise UserError(f"{path}: empty; a table has a column of paths and one of labels")
    header = rows[0][1]
    if any(_key(cell) in files for cell in header):  # an image: there is no header
        return [str(number) for number in range(1, len(header) + 1)], rows
    return header, rows[1:]


def _find_columns(
    table: LabelTable, header: list[str], rows: Rows, files: Mapping[str, str]
) -> dict[str, int]:
    """Return the column of each of `ROLES`, as ``table.columns`` names it or by its content."""
    known = f"{table.path} has the columns {', '.join(header)}"
    found: dict[str, int] = {}
    for pair in table.columns.split(",") if table.columns else ():
        role, _, name = pair.partition("=")
        if role not in ROLES or name not in header:
            raise UserError(f"columns: {pair!r} is none of path=, label=, split=NAME; {known}")
        found[role] = header.index(name)
    cells = [[row[at] for _, row in rows if at < len(row)] for at in range(len(header))]
    left = [at for at in range(len(header)) if at not in found.values()]
    if "path" not in found:
        hits = {at: sum(_key(cell) in files for cell in cells[at]) for at in left}
        found["path"] = max(left, key=hits.__getitem__, default=0)
        if not any(hits.values()):
            raise UserError(f"{known}, none with paths of images relative to IMAGES")
        left.remove(found["path"])
    splits = [at for at in left if all(map(SPLIT_NAME.fullmatch, cells[at]))]
    if splits and "split" not in found:
        found["split"] = splits[0]
        left.remove(splits[0])
    if "label" not in found:
        named = [at for at in left if header[at].lower() in LABEL_NAMES]
        # identifiers and sizes rarely do
        repeating = [at for at in left if 2 * len({*cells[at]}) <= len(rows)]
        candidates = named or repeating or left
        if len(candidates) != 1:
            some = ", ".join(header[at] for at in candidates) or "none"
            raise UserError(f"{known}; labels may be {some}: name it, as columns label=NAME")
        found["label"] = candidates[0]
    return found


def _match(
    rows: Rows, width: int, columns: Mapping[str, int], files: Mapping[str, str]
) -> tuple[BySplit, list[str]]:
    """Return the images that have one label, and a line for each row and image without a match."""
    refused = []
    found: dict[str, set[tuple[str, str]]] = {}  # split and class of each path
    for line, row in rows:
        if len(row) != width:
            fault = f"{len(row)} cells, not {width}; names with commas need quotes"
            refused.append(f"line {line}: {fault}")
            continue
        cell = {role: row[at] for role, at in columns.items()}
        path = files.get(_key(cell["path"]))
        split = SPLIT_NAME.fullmatch(cell.get("split", "train"))
        if path is None:
            refused.append(f"line {line}: {cell['path']}: no such image")
            continue
        answers = found.setdefault(path, set())
        if not cell["label"]:
            refused.append(f"line {line}: {path}: no label")
        elif not split:
            fault = f"split {cell['split']!r} is not train, val or test"
            refused.append(f"line {line}: {path}: {fault}")
        else:
            name = SPLITS[split[1].lower()] if "split" in columns else ""
            answers.add((name, canonical_name(cell["label"])))
    by_split: BySplit = defaultdict(dict)
    for path, answers in found.items():
        if len(answers) > 1:
            several = list_some([f"{split} {label}".strip() for split, label in sorted(answers)])
            refused.append(f"{path}: several labels: {several}")
            continue
        for split, label in answers:
            by_split[split][path] = label
    refused += [f"{path}: no row" for path in sorted({*files.values()} - found.keys())]
    return by_split, refused


def _number_classes(
    path: Path, by_split: BySplit, split: str | None
) -> tuple[list[str], dict[str, Files]]:
    """Return the classes, which are those of train, and the files of the splits that are wanted."""
    wanted = [split] if split else ["train", "validation"]
    chosen = {name: by_split[name] for name in wanted if name in by_split}
    chosen = chosen or {wanted[0]: by_split[""]}
    known = by_split.get("train") or chosen[wanted[0]]
    class_names = sorted({*known.values()})
    if len(class_names) < 2 and not split:
        raise UserError(f"{path}: one class, {class_names[0]}; at least 2 are needed")
    labels = {name: label for label, name in enumerate(class_names)}
    splits: dict[str, Files] = {}
    for name, classes in chosen.items():
        for unknown in sorted({*classes.values()} - labels.keys()):
            raise UserError(
                f"{path}: class {unknown} of {name} has no training images; remove it or add them"
            )
        splits[name] = sorted((file, labels[of_file]) for file, of_file in classes.items())
    return class_names, splits
