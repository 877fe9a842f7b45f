"""Inject every fault that a run should survive into real runs of several processes, and print what came of it.

python scripts/faults.py                          all of it, into docs/reliability.md too
python scripts/faults.py --quick                  a try or two of the cheap ones
python scripts/faults.py --only NAME --seed 7     the rows whose name contains NAME, with other random choices

Each try is a function of the seed, the row's name and the number of the try. Needs Linux; as root, the disks that fill
up are real file systems. Exit status 1 if a row does not survive.
"""

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from injection.bad_data import data_faults
from injection.bench import Bench, Fault, Recovery
from injection.disks import disk_faults
from injection.elastic import elastic_faults
from injection.kills import kill_faults
from injection.numerics import numeric_faults
from injection.processes import RunLostError
from injection.ranks import rank_faults
from injection.stops import stop_faults

from common.metrics.provenance import describe_run, format_command, name_hardware
from common.table import format_table

# imported here once: every process that is forked has it
from imagenet_dali import imagenet_dali_dataloader  # noqa: F401

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
HEADING = "## What was injected\n"


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    faults = [fault for fault in all_faults(args.kills) if args.only in fault.name]
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    bench, started = Bench(folder), time.monotonic()
    tries = {fault.name: fault.quick if args.quick else fault.tries for fault in faults}
    rows = [inject(fault, bench, args.seed, tries[fault.name]) for fault in faults if tries[fault.name]]
    if not rows:
        print(f"error: --only {args.only!r}: no row has such a name", file=sys.stderr)
        return 2
    table = format_table(rows)
    print(table)
    survived = all(map(has_survived, rows))
    if survived:
        shutil.rmtree(folder)
    if not (args.only or args.quick):
        write_page(table, describe(argv, time.monotonic() - started))
    return int(not survived)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="kills at random places, over all modes (default: 50)")
    parser.add_argument("--quick", action="store_true", help="a try or two of the cheap rows, and no page")
    parser.add_argument("--only", default="", metavar="NAME", help="the rows whose name contains this")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (default: 0)")
    return parser.parse_args(argv)


def all_faults(kills: int) -> list[Fault]:
    """Return the rows of the table, in order."""
    more = (stop_faults, rank_faults, numeric_faults, disk_faults, data_faults, elastic_faults)
    return [*kill_faults(kills), *(fault for faults in more for fault in faults())]


def inject(fault: Fault, bench: Bench, seed: int, tries: int) -> dict[str, Any]:
    """Return a row of the table."""
    recoveries = [attempt(fault, bench, f"{seed}/{fault.name}/{number}") for number in range(tries)]
    survived = [recovery for recovery in recoveries if recovery is not None]
    compared = [recovery.equal for recovery in survived if recovery.equal is not None]
    lost = [recovery.seconds_lost for recovery in survived if recovery.seconds_lost is not None]
    return {
        "fault": fault.name,
        "tries": tries,
        "survived": len(survived),
        "equal": sum(compared) if compared else "",
        "seconds lost": f"{statistics.median(lost):.1f}" if lost else "",
    }


def has_survived(row: Mapping[str, Any]) -> bool:
    """Return whether every try of a row survived, and came out equal where that can be."""
    return row["survived"] == row["tries"] and row["equal"] in ("", row["tries"])


def attempt(fault: Fault, bench: Bench, seed: str) -> Recovery | None:
    """Return how one try went; None, with the reason on the terminal, if it did not survive."""
    print(f"{fault.name} [{seed}]", flush=True)
    try:
        return fault.inject(bench, random.Random(seed))
    except RunLostError as reason:
        print(f"    NOT SURVIVED: {reason}", flush=True)
    except Exception:
        print(f"    NOT SURVIVED: {traceback.format_exc()}", flush=True)
    return None


def describe(argv: Sequence[str], seconds: float) -> str:
    about = describe_run(list(argv))
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    return (
        f"`{format_command(['python', 'scripts/faults.py', *argv])}`, {time.strftime('%Y-%m-%d')}, commit "
        f"{about['commit']}, {name_hardware(about['hardware'])}, {versions}; "
        f"{seconds / 60:.0f} minutes."
    )


def write_page(table: str, provenance: str) -> None:
    """Replace what follows `HEADING` in the page."""
    before = PAGE.read_text().partition(HEADING)[0]
    PAGE.write_text(f"{before}{HEADING}\n{provenance}\n\n{table}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
