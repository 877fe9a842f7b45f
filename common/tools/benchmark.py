"""The command line of a benchmark: its options, its rows with provenance in a JSON Lines file, and its table."""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common.errors import command_parser
from common.metrics.provenance import PACKAGES, describe_run
from common.tools.harness import COMPLETE, ROOT, Row
from common.tools.result_rows import Record, add_line, format_records

RESULTS, TINY_RESULTS = ROOT / "scripts" / "bench" / "results.jsonl", ROOT / "outputs" / "bench.jsonl"


def run_benchmark(
    name: str,
    measure: Callable[[argparse.Namespace], Iterator[Row]],
    argv: list[str],
    doc: str,
    *,
    rounds: int,
    packages: Sequence[str] = (),
    **options: dict[str, Any],
) -> None:
    """Write each row of ``measure(args)`` to ``--output`` at once, and print all as a table.

    ``options`` are the benchmark's own: names and arguments of `add_argument`. Provenance includes the versions of
    ``packages``.
    """
    parser = command_parser(doc)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of each variant (default: {rounds})")
    parser.add_argument("--tiny", action="store_true", help="so small that it shows only that everything runs")
    parser.add_argument("--output", type=Path, help=f"file to add rows to (default: {RESULTS.relative_to(ROOT)})")
    for option, arguments in options.items():
        parser.add_argument(f"--{option}", **arguments)
    args = parser.parse_args(argv)
    path = args.output or (TINY_RESULTS if args.tiny else RESULTS)
    run, started = describe_run(argv, (*PACKAGES, *packages)) | {"tiny": args.tiny}, time.monotonic()
    record = Record(name, run, status=COMPLETE, why=None)
    for row in measure(args):
        record.rows.append(row)
        add_line(path, name, run, row=row)
        print(json.dumps(row), flush=True)
    record.seconds = round(time.monotonic() - started, 3)
    add_line(path, name, run, status=COMPLETE, why=None, seconds=record.seconds)
    print(format_records([record], {}))
