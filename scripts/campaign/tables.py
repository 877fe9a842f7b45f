"""The campaign's results as Markdown."""

from collections.abc import Sequence
from typing import Any

from campaign.runner import COMPLETE, Record
from common.metrics.provenance import name_hardware
from common.table import format_table


def format_records(records: Sequence[Record]) -> str:
    """Return a heading, a table and what makes it count for each record."""
    return "\n\n".join(map(_format, records))


def _format(record: Record) -> str:
    parts = [f"## {record['piece']}", record["shows"] or "", _format_rows(record["rows"])]
    if record["status"] != COMPLETE:
        parts.append(f"{record['status'].capitalize()}: {record['why'].strip().splitlines()[-1]}")
    return "\n\n".join(part for part in [*parts, _provenance(record)] if part)


def _format_rows(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return format_table([{name: _cell(row.get(name, "")) for name in names} for row in rows]) if rows else ""


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(map(_cell, value))
    if isinstance(value, dict):
        return " ".join(f"{key}={_cell(part)}" for key, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _provenance(record: Record) -> str:
    hardware, versions = record["hardware"], record["versions"]
    machine = f"{hardware['gpu']}, driver {hardware['driver']}, " if hardware["gpu"] else ""
    numbers = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    return (
        f"{'Tiny. ' if record['tiny'] else ''}{machine}{name_hardware(hardware | {'gpu': None})}; {numbers}; "
        f"commit {record['commit']}, code {record['code']}; {record['seconds']:.0f} s."
    )
