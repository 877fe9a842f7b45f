"""Text for the terminal: safe to print, wrapped, tables, and phrases of messages."""

import difflib
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Control characters, line separators, overrides of the direction of text, and bytes that are not
# UTF-8.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# A number, and further ones or a unit: "-1.5e-3", "*2,050-2,057", "4x256x8", "0.4 to 0.5", "3 GB".
NUMBERS = re.compile(r"[*+-]?[\d.,]+(e[+-]?\d+)?([-+x %].*)?|nan")


def printable(text: object) -> str:
    """Return ``text`` in one line, with what is `UNPRINTABLE` in it escaped."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def print_wrapped(text: str, indent: int = 4, *, is_warning: bool = False) -> None:
    """Print ``text`` in lines of at most 80 columns, the later ones indented.

    Longer words, such as paths, are not cut.
    """
    wrap = textwrap.TextWrapper(
        80,
        subsequent_indent=" " * indent,
        # A path or a flag that is cut could not be copied.
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
    )
    print(wrap.fill(printable(text)), file=sys.stderr if is_warning else sys.stdout, flush=True)


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table for the terminal, which is Markdown too; numbers stand right."""
    lines = [list(rows[0])]
    lines += [list(map(printable, row.values())) for row in rows]
    columns = []
    for name, *cells in zip(*lines, strict=True):
        width = max(2, len(name), *map(len, cells))  # Markdown needs a dash and a colon.
        has_numbers = any(map(NUMBERS.fullmatch, cells))
        rule = "-" * (width - 1) + (":" if has_numbers else "-")
        align = str.rjust if has_numbers else str.ljust
        columns.append([align(cell, width) for cell in (name, rule, *cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def shorten_names(names: Iterable[str], most: int) -> dict[str, str]:
    """Return a text of at most ``most`` letters for each name; different names have different ones.

    A longer name keeps its start and its end. Where others would look the same, what follows their
    common start replaces the end, and its number in ``names`` if that is the same too.
    """
    tail = most // 2
    numbers: dict[str, int] = {}
    alike: dict[str, list[str]] = {}
    for number, name in enumerate(names):
        if name not in numbers:
            numbers[name] = number
            text = name if len(name) <= most else f"{name[: most - tail - 2]}..{name[-tail:]}"
            alike.setdefault(text, []).append(name)
    named: dict[str, str] = {}  # by text
    for text, group in alike.items():
        start = len(os.path.commonprefix(group))  # noqa: RUF071  (of letters)
        for name in group:
            own = text if len(group) == 1 else f"{name[:3]}..{name[start : start + most - 5]}"
            if own in named:
                end = f"..#{numbers[name]}"
                own = own[: most - len(end)] + end
            named[own] = name
    return {name: text for text, name in named.items()}


def two_digits(number: float) -> str:
    """Return ``number``, 10 or more, rounded to two digits, as "1,900"."""
    return f"{float(f'{number:.2g}'):,.0f}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, or an empty string."""
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def counted(number: int, unit: str) -> str:
    """Return ``number`` with its unit, as "1 process" or "2 processes"."""
    if number == 1:
        return f"1 {unit}"
    return f"{number} {unit}{'es' if unit.endswith('s') else 's'}"


def list_some(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and how many more there are, as "a, b and 3 more"."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def print_some(lines: Sequence[str], most: int = 20) -> None:
    """Print the first lines, of which there may be a million, and how many more there are."""
    for line in lines[:most]:
        # `printable` would escape a tab, which is a control character.
        print(printable(line.expandtabs(1)))
    if len(lines) > most:
        print(f"... and {len(lines) - most:,} more")


def first_line(error: BaseException) -> str:
    """Return the first line of what ``error`` says, or the name of its type if it says nothing."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()
    return type(error).__name__


def nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of ``unit`` next to ``value``, which is none, as ``"4 or 8"``."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def describe_bytes(nbytes: float) -> str:
    """Return a number of bytes in GB, or of less than a tenth in MB."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"
