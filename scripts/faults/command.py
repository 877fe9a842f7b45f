"""Inject faults into real multi-process runs, and print the results.

python scripts/faults.py                          all rows, also written to docs/reliability.md
python scripts/faults.py --only NAME --seed 7     rows with NAME in their name, with another random seed
python scripts/faults.py --list                   the rows

Each try depends only on the seed, the row's name and the try's number; each row runs in its own process, with a time
limit. Needs Linux; the rows of disks need root. Exit status 1 if a row does not survive.
"""

import importlib
import random
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError, command_parser
from common.metrics.provenance import describe_run
from common.tools.harness import ROOT, Row, run_piece
from common.tools.result_rows import format_provenance, format_rows
from faults.lab import FAULTS, Fault, Lab, Recovery

# imported once, for all forked processes
from imagenet_dali import imagenet_dali_dataloader  # noqa: F401

PAGE = ROOT / "docs" / "reliability.md"
HEADING = "## Injected faults\n"
MODULES = ("kills", "stops", "ranks", "numerics", "disks", "bad_data", "storage", "elastic")  # the order of the table
for module in MODULES:
    importlib.import_module(f"faults.{module}")
SECONDS = 180.0  # that a try may take


def main(argv: Sequence[str]) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="only rows with this in their name")
    parser.add_argument("--tries", type=int, metavar="N", help="tries of each row (default: each row's own)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    args = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if args.only in fault.name]
    if not faults:
        raise UserError(f"--only {args.only!r}: no row has this in its name; --list prints them")
    if args.list:
        print("\n".join(fault.name for fault in faults))
        return 0
    folder, run = Path(tempfile.mkdtemp(prefix="faults-")), describe_run(list(argv))
    lab = Lab(folder)
    rows = [inject(fault, lab, args.seed, args.tries or fault.tries) for fault in faults]
    table = format_rows(rows)
    print(table)
    survived = all(map(has_survived, rows))
    if survived:
        shutil.rmtree(folder)
    if not (args.only or args.tries):
        minutes = (time.time() - run["started"]) / 60
        write_page(table, f"{format_provenance(run)}; {minutes:.0f} minutes.")
    return int(not survived)


def inject(fault: Fault, lab: Lab, seed: int, tries: int) -> Row:
    recoveries: list[Row] = []
    seeds = [f"{seed}/{fault.name}/{number}" for number in range(tries)]
    status, why = run_piece(attempt, fault, lab, seeds, seconds=SECONDS * tries, save=recoveries.append)
    if why:
        print(f"    NOT SURVIVED: {fault.name}: {status}: {why}", flush=True)
    survived = [recovery for recovery in recoveries if recovery["survived"]]
    compared = [recovery["equal"] for recovery in survived if recovery["equal"] is not None]
    lost = [recovery["seconds_lost"] for recovery in survived if recovery["seconds_lost"] is not None]
    return {
        "fault": fault.name,
        "tries": tries,
        "survived": len(survived),
        "equal": sum(compared) if compared else "",
        "seconds lost": f"{statistics.median(lost):.1f}" if lost else "",
    }


def attempt(fault: Fault, lab: Lab, seeds: Sequence[str]) -> Iterator[Row]:
    """Yield the outcome of each try; print why one did not survive."""
    for seed in seeds:
        print(f"{fault.name} [{seed}]", flush=True)
        recovery: dict[str, Any] = {"survived": False}
        try:
            recovery = {"survived": True} | (fault.inject(lab, random.Random(seed)) or Recovery())._asdict()
        except Exception:
            print(f"    NOT SURVIVED: {traceback.format_exc(limit=-2)}", flush=True)
        yield recovery


def has_survived(row: Mapping[str, Any]) -> bool:
    """Return whether every try of a row survived, with equal results if compared."""
    return row["survived"] == row["tries"] and row["equal"] in ("", row["tries"])


def write_page(table: str, provenance: str) -> None:
    before, heading, _ = PAGE.read_text().partition(HEADING)
    assert heading, f"{PAGE} has no {HEADING!r}"
    PAGE.write_text(f"{before}{HEADING}\n{provenance}\n\n{table}\n")
