"""Records of metrics.jsonl."""

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]
WHEN = ("kind", "step", "epoch", "time")


def select_metrics(record: Record) -> dict[str, float]:
    """Return the record's measured numbers as ``<kind>/<name>``."""
    return {
        f"{record['kind']}/{name}": value
        for name, value in record.items()
        if name not in WHEN and isinstance(value, (int, float))
    }
