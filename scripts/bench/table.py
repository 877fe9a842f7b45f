"""What the benchmarks share: their options, a row for each variant, the table, and the CSV file of all results."""

import argparse
import csv
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.metrics.provenance import PACKAGES, describe_columns, format_command
from common.table import format_table
from common.tools.harness import Figures

NOT_INSTALLED = "not installed"


def parse_options(argv: Sequence[str], doc: str, rounds: int, **more: dict[str, Any]) -> argparse.Namespace:
    """Parse ``--rounds``, ``--tiny``, ``--csv`` and the options of ``more`` (name: arguments of `add_argument`)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of each variant (default: {rounds})")
    parser.add_argument("--tiny", action="store_true", help="so small that it shows only that everything runs")
    parser.add_argument("--csv", type=Path, help="table to add the results to (default: scripts/bench/<name>.csv)")
    parser.add_argument("--debug", action="store_true", help="show a traceback for mistakes too")
    for name, options in more.items():
        parser.add_argument(f"--{name}", **options)
    return parser.parse_args(argv)


def summarise(
    figures: Mapping[str, Sequence[Figures] | None], reference: str, *, units: float = 1
) -> list[dict[str, str]]:
    """Return a row for each variant: medians and quartiles over its rounds; None for one that is not installed.

    Times are in ms for each of the ``units`` of work of a round. Ratios are to the reference's in the same round.
    """
    return [{"variant": name} | _summarise(rounds, figures[reference], units) for name, rounds in figures.items()]


def _summarise(rounds: Sequence[Figures] | None, reference: Sequence[Figures], units: float) -> dict[str, str]:
    cells = {}
    for clock in ("cpu", "wall"):
        if not rounds or clock not in rounds[0]:
            missing = NOT_INSTALLED if rounds is None else ""
            cells |= {f"{clock}_ms": missing} | dict.fromkeys(
                (f"{clock}_quartiles", f"x_{clock}", f"x_{clock}_quartiles"), ""
            )
            continue
        ratios = [ours[clock] / theirs[clock] for ours, theirs in zip(rounds, reference, strict=True)]
        cells |= _spread(f"{clock}_ms", [figure[clock] / units * 1e3 for figure in rounds], "#.4g")
        cells |= _spread(f"x_{clock}", ratios, ".4f")
    return cells | {"rounds": str(len(rounds or ()))}


def _spread(name: str, values: Sequence[float], form: str) -> dict[str, str]:
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {name: f"{middle:{form}}", f"{name.removesuffix('_ms')}_quartiles": f"{first:{form}} to {third:{form}}"}


def report(
    benchmark: str, part: str, rows: Sequence[Mapping[str, str]], path: Path | None, packages: Iterable[str] = ()
) -> None:
    """Print the rows as a table, and add them to a CSV file with what makes them count.

    The file is ``<benchmark>.csv`` beside this one, unless ``path`` names another.
    """
    print(f"\n{benchmark}: {part}\n\n{format_table(rows)}", flush=True)
    about = describe_columns((*PACKAGES, *packages))
    about["command"] = f"python scripts/bench/{benchmark}.py {format_command(sys.argv[1:])}".rstrip()
    path = path or Path(__file__).with_name(f"{benchmark}.csv")
    full = [{"part": part} | row | about for row in rows]
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, full[0], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(full)
