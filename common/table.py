"""Text for the terminal, and tables of results: rows are dicts with the same keys, nested ones flattened."""

import csv
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import printable
from common.files import own_file

Row = Mapping[str, Any]
WIDTH = 80


def print_wrapped(text: str, indent: int = 4, *, is_warning: bool = False) -> None:
    """Print ``text`` in lines of at most 80 columns, the later ones indented, but for longer words such as paths."""
    wrap = textwrap.TextWrapper(
        WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False, expand_tabs=False
    )
    print(wrap.fill(printable(text)), file=sys.stderr if is_warning else sys.stdout, flush=True)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"a.b": value}`` for ``{"a": {"b": value}}``; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_nested = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value}
    return flat


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as a table for the terminal, which is Markdown too."""
    header, *body = [list(rows[0]), *([printable(value) for value in row.values()] for row in rows)]
    widths = [max(2, *map(len, column)) for column in zip(header, *body, strict=True)]  # Markdown needs a dash
    lines = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in (header, *body)]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write the rows under a header."""
    with own_file(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
