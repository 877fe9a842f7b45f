"""List images by a table of paths and labels (CSV or TSV), as Kaggle and spreadsheets write it."""

import csv
import io
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.data.bad_images import MAX_BAD_SHARE
from common.data.image_folder import SPLIT_NAME, SPLITS, list_files
from common.errors import UserError
from common.files import canonical_name, read_text
from common.launchers import is_first_process
from common.shards.source import ImageListing, check_split
from common.text import print_some, print_wrapped

ROLES = ("path", "label", "split")
# of columns; where one has such a name, others that may be labels do not count
LABEL_NAMES = ("label", "labels", "class", "class_name", "category", "target")
MAX_TABLE = 1 << 30  # bytes; ten million rows fit

Rows = list[tuple[int, dict[str, str]]]  # the line in the file, and cells by column
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
    # also without a suffix; backwards, so that of 1.jpg and 1.png the first is taken
    files = {_key(os.path.splitext(name)[0]): name for name in reversed(names)}
    files |= {_key(name): name for name in names}
    header, rows = _read_rows(table.path)
    # Else the first image would be left out.
    if not rows or any(_key(cell) in files for cell in header):
        raise UserError(
            f"{table.path}: its first line names an image, or is the only one; name the columns "
            "above the rows"
        )
    columns = _find_columns(table, root, header, rows, files)
    by_split, refused = _match(rows, columns, files)
    count = f"rows or images without a match: {len(refused):,}"
    if is_first_process():
        said = ", ".join(f"{role} in column {name}" for role, name in columns.items())
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
    wanted = [split] if split else ["train", "validation"]
    chosen = {name: by_split[name] for name in wanted if name in by_split}
    # Without a column of splits all images are train, or the split that is asked for.
    chosen = chosen or {wanted[0]: by_split[""]}
    # A test split alone is numbered as train is, whose classes it may lack.
    known = by_split.get("train") or chosen[wanted[0]]
    labels = {name: label for label, name in enumerate(sorted({*known.values()}))}
    if len(labels) < 2 and not split:
        raise UserError(f"{table.path}: one class, {min(labels)}; at least 2 are needed")
    splits = {}
    for part, classes in chosen.items():
        for name in sorted({*classes.values()} - labels.keys()):
            raise UserError(
                f"{table.path}: class {name} of {part} has no training images; remove it or add "
                "them"
            )
        splits[part] = sorted((path, labels[name]) for path, name in classes.items())
    return ImageListing(root, [*labels], splits, refused=refused), by_split


def _key(name: str) -> str:
    """Return a path as it compares, of Windows too."""
    return canonical_name(os.path.normpath(name.strip().replace("\\", "/")))


def _read_rows(path: Path) -> tuple[Sequence[str], Rows]:
    """Return the names of the columns, and the rows that are not empty."""
    # Excel writes a byte-order mark, which would be part of the first column's name.
    text = read_text(path, MAX_TABLE).removeprefix("\ufeff")
    reader = csv.DictReader(
        io.StringIO(text, newline=""),
        restval="",
        # Where a comma is the decimal point, spreadsheets separate by semicolons: the header tells.
        delimiter=max(",;\t", key=text.partition("\n")[0].count),
        skipinitialspace=True,
        strict=True,  # a quote that is not closed would take in all that follows
    )
    try:
        rows = [(reader.line_num, row) for row in reader if any(row.values())]
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.reader.line_num}: {error}; mend it") from error
    return reader.fieldnames or (), rows


def _find_columns(
    table: LabelTable, root: Path, header: Sequence[str], rows: Rows, files: Mapping[str, str]
) -> dict[str, str]:
    """Return the column of each of `ROLES`, as ``table.columns`` names it or by its content."""
    known = f"{table.path} has the columns {', '.join(header)}"
    pairs = table.columns.split(",") if table.columns else ()
    found = {role: name for role, _, name in (pair.partition("=") for pair in pairs)}
    if not {*ROLES} >= found.keys():
        raise UserError(
            f"--columns or DATA.columns, {table.columns}: write path=NAME,label=NAME; {known}"
        )
    for name in found.values():
        if name not in header:
            raise UserError(
                f"--columns or DATA.columns, {table.columns}: no column {name}; {known}"
            )
    cells = {name: [row[name] for _, row in rows] for name in header}
    left = [name for name in header if name not in found.values()]

    def choose(role: str, candidates: Sequence[str]) -> None:
        """Take the only candidate, unless the column is known; refuse several, or none."""
        if role in found:
            return
        if len(candidates) != 1:
            some = " or ".join(candidates) or "none of them"
            raise UserError(
                f"{known}; {role} may be {some}: name it in --columns or DATA.columns, {role}=NAME"
            )
        found[role] = candidates[0]
        left.remove(candidates[0])

    possible = [found["path"]] if "path" in found else left
    hits = {name: sum(_key(cell) in files for cell in cells[name]) for name in possible}
    if possible and not any(hits.values()):
        missing = _name_missing([cell for name in possible for cell in cells[name]], root, files)
        raise UserError(f"{table.path}: no row names an image: {missing}")
    choose("path", [name for name in possible if hits[name] == max(hits.values())])
    splits = [name for name in left if all(map(SPLIT_NAME.fullmatch, cells[name]))]
    if splits:
        choose("split", splits)
    named = [name for name in left if name.lower() in LABEL_NAMES]
    # identifiers and sizes rarely do
    repeating = [name for name in left if 2 * len({*cells[name]}) <= len(rows)]
    choose("label", named or repeating or left)
    return found


def _name_missing(cells: Sequence[str], root: Path, files: Mapping[str, str]) -> str:
    """Return which cell is no path of ``files``, best one that names a file in another folder."""
    paths = {os.path.basename(key): path for key, path in files.items()}
    for cell in cells:
        path = paths.get(os.path.basename(_key(cell)))
        if path:
            return f"{cell} is not in {root}; a file of that name is in {(root / path).parent}"
    return f"{cells[0]} is not in {root}"


def _match(
    rows: Rows, columns: Mapping[str, str], files: Mapping[str, str]
) -> tuple[BySplit, list[str]]:
    """Return the images that have one label, and a line for each row and image without a match."""
    refused = []
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)  # split and class of each path
    for line, row in rows:
        path = files.get(_key(row[columns["path"]]), "")
        label = canonical_name(row[columns["label"]].strip())
        word = row[columns["split"]] if "split" in columns else "train"
        split = SPLIT_NAME.fullmatch(word)
        # A row with a fault leaves an entry too: its image is not counted again, as without a row.
        answers = found[path]
        fault = ""
        if None in row:  # csv's key for cells beyond the header's
            fault = "more cells than columns; names with commas need quotes"
        elif not path:
            fault = "no such image"
        elif not label:
            fault = "no label"
        elif not split:
            fault = f"split {word!r} is not train, val or test"
        else:
            answers.add((SPLITS[split[1].lower()] if "split" in columns else "", label))
        if fault:
            refused.append(f"line {line}: {row[columns['path']]}: {fault}")
    by_split: BySplit = defaultdict(dict)
    for path, answers in found.items():
        if len(answers) > 1:
            several = ", ".join(f"{split} {label}".strip() for split, label in sorted(answers))
            refused.append(f"{path}: several labels: {several}")
            continue
        for split, label in answers:
            by_split[split][path] = label
    refused += [f"{path}: no row" for path in sorted({*files.values()} - found.keys())]
    return by_split, refused
