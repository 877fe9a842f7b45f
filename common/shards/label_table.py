"""List images by a table of paths and labels (CSV or TSV), as Kaggle and spreadsheets write it."""

import csv
import io
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.data.bad_images import MAX_BAD_SHARE
from common.data.image_folder import SPLIT_NAME, SPLITS, list_files
from common.errors import UserError
from common.files import canonical_name, read_text
from common.launchers import is_first_process
from common.shards.source import ImageListing, check_split
from common.text import list_some, print_some, print_wrapped

ROLES = ("path", "label", "split")
# of columns; where one has such a name, others that may be labels do not count
LABEL_NAMES = ("label", "labels", "class", "class_name", "category", "target")
# Columns that ask for one split, is_test or test, and what their cells answer.
QUESTION = re.compile(f"(?:is[_ -]?)?{SPLIT_NAME.pattern}", re.IGNORECASE)
ANSWERS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
# Columns that may tell the test rows, by their names.
SPLIT_COLUMN = re.compile(
    f".*split|sub_?set|set|usage|partition|folds?|k_?fold|phase|hold_?out|{QUESTION.pattern}",
    re.IGNORECASE,
)
SEPARATORS = re.compile(r"[|;,&+/\s\[\]()'\"]+")  # of several labels in a cell
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
        print_wrapped(f"{table.path}: {_describe(columns, header, rows, by_split)}; {count}")
        print_some(refused, 5)
    total = max(len(rows), len(names))
    if len(refused) > table.max_refused * total or not by_split:
        raise UserError(
            f"{table.path}: {count}, more than {100 * min(table.max_refused, 0.99):g}% of "
            f"{total:,}; mend the table, whose paths are relative to {root} and whose column of "
            "splits, if any, has train, val or test in each row, remove other images, or raise "
            "prepare's --max-refused"
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


def _describe(
    columns: Mapping[str, str], header: Sequence[str], rows: Rows, by_split: BySplit
) -> str:
    """Return which columns are used for what, which are not, and what the rows say."""
    parts = [f"{role} in column {name}" for role, name in columns.items()]
    unused = [name for name in header if name and name not in columns.values()]
    if unused:
        parts.append(f"not used: {list_some(unused, 20)}")
    parts.append(f"{len(rows):,} rows")
    if "split" in columns:
        name = columns["split"]
        images = [f"{len(of_split):,} {split}" for split, of_split in sorted(by_split.items())]
        parts.append(f"images: {', '.join(images)}")
        unknown = Counter(row[name] for _, row in rows if not _split_of(name, row[name]))
        if unknown:
            parts.append(f"not a split: {_describe_values(unknown)}")
    return "; ".join(parts)


def _describe_values(counts: Counter[str]) -> str:
    """Return the most frequent values with their numbers."""
    return list_some([f"{value or 'blank'} ({n:,})" for value, n in counts.most_common()])


def _split_of(column: str, cell: str) -> str:
    """Return the split that a cell names, or "". In is_train, 0 is test; in is_test it is train."""
    word = SPLIT_NAME.fullmatch(cell)
    if word:
        return SPLITS[word[1].lower()]
    question = QUESTION.fullmatch(column)
    answer = ANSWERS.get(cell.lower())
    if not question or answer is None:
        return ""
    split = SPLITS[question[1].lower()]
    if answer:
        return split
    return "test" if split == "train" else "train"


def _has_several(label: str, labels: Collection[str]) -> bool:
    """Return whether a cell holds several labels: all of them alone elsewhere, or with | or ;."""
    parts = [part for part in SEPARATORS.split(label) if part]
    is_list = label.startswith("[") or "|" in label or ";" in label
    return len(parts) > 1 and (is_list or all(part in labels for part in parts))


def _key(name: str) -> str:
    """Return a path as it compares, of Windows too."""
    return canonical_name(os.path.normpath(name.strip().replace("\\", "/")))


def _read_rows(path: Path) -> tuple[Sequence[str], Rows]:
    """Return the names of the columns, and the rows that are not empty, without outer spaces."""
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
    rows: Rows = []
    try:
        header = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = header
        for row in reader:
            # The key None is csv's, for a list of the cells beyond the header's.
            cells = {name: cell.strip() if name is not None else cell for name, cell in row.items()}
            if any(cells.values()):
                rows.append((reader.line_num, cells))
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.reader.line_num}: {error}; mend it") from error
    for name, number in Counter(filter(None, header)).items():
        if number > 1:
            raise UserError(f"{path}: {number} columns are named {name}; rename or remove one")
    return header, rows


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
    has_no_split = found.get("split") == ""
    for name in found.values():
        if name not in header and not (has_no_split and not name):
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
    splits = _find_splits({name: Counter(cells[name]) for name in left}, known, found)
    if splits:
        choose("split", splits)
    if has_no_split:
        del found["split"]
    named = [name for name in left if name.lower() in LABEL_NAMES]
    # identifiers and sizes rarely do
    repeating = [name for name in left if 2 * len({*cells[name]}) <= len(rows)]
    choose("label", named or repeating or left)
    return found


def _find_splits(
    columns: Mapping[str, Counter[str]], known: str, found: Mapping[str, str]
) -> list[str]:
    """Return which columns have mostly splits, given the numbers of their values.

    Raises `UserError` where none has, but a name says that one may tell the test rows.
    """
    splits = []
    doubtful = ""
    for name, counts in columns.items():
        filled = counts.total() - counts[""]
        words = sum(number for cell, number in counts.items() if _split_of(name, cell))
        if 2 * words > filled and name.lower() not in LABEL_NAMES:
            splits.append(name)
        elif SPLIT_COLUMN.fullmatch(name) and len(counts) > 1:
            doubtful = name
    if doubtful and not splits and "split" not in found:
        raise UserError(
            f"{known}; {doubtful} may tell the test rows, but its values are "
            f"{_describe_values(columns[doubtful])}: write train, val and test, or add --columns "
            "split= to use all rows"
        )
    return splits


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
    labels = {row[columns["label"]] for _, row in rows}
    several = {label for label in labels if _has_several(label, labels)}
    column = columns.get("split")
    for line, row in rows:
        path = files.get(_key(row[columns["path"]]), "")
        label = canonical_name(row[columns["label"]])
        split = _split_of(column, row[column]) if column else ""
        # A row with a fault leaves an entry too: its image is not counted again, as without a row.
        answers = found[path]
        fault = ""
        if None in row:  # csv's key for cells beyond the header's
            fault = "more cells than columns; names with commas need quotes"
        elif not path:
            fault = "no such image"
        elif not label:
            fault = "no label"
        elif row[columns["label"]] in several:
            fault = f"several labels in a cell: {label}"
        elif column and not split:
            fault = f"split {row[column]!r} is not train, val or test"
        else:
            answers.add((split, label))
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
