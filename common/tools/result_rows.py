"""Results with their provenance as JSON Lines, and as Markdown tables.

A file is append-only: a line for each row, and one for the end of the piece that yielded it. Every line has the
provenance of its run: command, commit, versions, hardware.
"""

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.metrics.provenance import format_command, name_hardware
from common.table import format_table
from common.tools.harness import COMPLETE, Row

INTERRUPTED = "interrupted"


@dataclass
class Record:
    """One run of a piece; ``status`` and ``why`` are those of `harness.run_piece`."""

    piece: str
    run: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    status: str = INTERRUPTED
    why: str | None = "its end is not recorded"
    seconds: float = 0.0


def add_line(path: Path, piece: str, run: Mapping[str, Any], **line: Any) -> None:
    """Add a row (``row=...``), or a piece's end (``status=..., why=..., seconds=...``), to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"piece": piece} | line | {"run": run}, default=str) + "\n")


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, in the order of their starts."""
    records: dict[tuple[str, float], Record] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        content = json.loads(line)
        piece, run = content.pop("piece"), content.pop("run")
        record = records.setdefault((piece, run["started"]), Record(piece, run))
        if "row" in content:
            record.rows.append(content["row"])
        else:
            record.status, record.why, record.seconds = (content[name] for name in ("status", "why", "seconds"))
    return list(records.values())


def format_records(records: Sequence[Record], titles: Mapping[str, str]) -> str:
    """Return a heading, a table and the provenance of each record as Markdown; ``titles`` are sentences by piece."""
    sections = []
    for record in records:
        parts = [f"## {record.piece}", titles.get(record.piece, ""), format_rows(record.rows)]
        if record.status != COMPLETE:
            parts.append(f"{record.status.capitalize()}: {record.why.strip().splitlines()[-1]}")  # pyright: ignore[reportOptionalMemberAccess]
        seconds = f"; {record.seconds:.0f} s." if record.seconds else "."
        sections += [part for part in (*parts, format_provenance(record.run) + seconds) if part]
    return "\n\n".join(sections)


def format_rows(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, with a column for every name in any of them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return format_table([{name: _cell(row.get(name)) for name in names} for row in rows]) if rows else ""


def _cell(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " to ".join(map(_cell, value))
    if isinstance(value, dict):
        return " ".join(f"{key}={_cell(part)}" for key, part in value.items())
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def format_provenance(run: Mapping[str, Any]) -> str:
    """Return command, date, commit, hardware and versions in a line."""
    hardware = run["hardware"]
    gpu = f"{hardware['gpu']}, driver {hardware.get('driver')}, " if hardware["gpu"] else ""
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items() if number)
    return (
        f"{'Tiny. ' if run.get('tiny') else ''}`{format_command(['python', *run['argv']])}`, "
        f"{time.strftime('%Y-%m-%d', time.gmtime(run['started']))}, commit {run['commit']}, "
        f"{gpu}{name_hardware({**hardware, 'gpu': None})}; {versions}"
    )


def summarise(
    measured: Mapping[str, Sequence[Row] | None], reference: str, units: float = 1, **names: Any
) -> Iterator[Row]:
    """Yield a row for each variant: ``names``, medians and quartiles over its rounds (None: not installed).

    Times are in ms for each of the ``units`` of work of a round. Ratios are to the reference in the same round.
    """
    for name, rounds in measured.items():
        row: Row = {**names, "variant": name, "rounds": len(rounds or ())}
        for clock in ("cpu", "wall"):
            if rounds and clock in rounds[0]:
                times = [one[clock] / units * 1e3 for one in rounds]
                ratios = [ours[clock] / other[clock] for ours, other in zip(rounds, measured[reference], strict=True)]  # pyright: ignore[reportArgumentType]
                row |= _spread(f"{clock}_ms", times) | _spread(f"x_{clock}", ratios)
        yield row if rounds else row | {"not_run": "not installed"}


def _spread(name: str, values: Sequence[float]) -> Row:
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3  # pyright: ignore[reportOperatorIssue]
    return {name: middle, f"{name}_quartiles": [first, third]}
