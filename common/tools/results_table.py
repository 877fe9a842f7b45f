"""Add finished runs, or those of a sweep, to a task's results: ``python scripts/record.py RUN TASK/results.csv``."""

import csv
import math
import os
import time
from pathlib import Path

from common.checkpoint.content import read_about
from common.errors import UserError, command_parser
from common.metrics.provenance import format_command, name_hardware
from common.tools.report import find_runs, load_run


def main(argv: list[str]) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run or a sweep")
    parser.add_argument("table", type=Path, metavar="TABLE", help="CSV file; made if it is not there")
    args = parser.parse_args(argv)
    rows = [summarise(run) for named in args.runs for run in find_runs(named)]
    with args.table.open("a+", newline="") as file:
        file.seek(0)
        header = next(csv.reader(file), [])
        if header not in ([], list(rows[0])):
            raise UserError(f"{args.table}: its columns are {', '.join(header)}, not a run's: name another table")
        file.seek(0, os.SEEK_END)
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        if not header:
            writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(", ".join(f"{name}={value}" for name, value in list(row.items())[:-3]))


def summarise(run: Path) -> dict[str, object]:
    """Return the row of a run; losses are those of the first and last train record."""
    loaded = load_run(run, run.name)
    about, train, evaluations = read_about(run), loaded.of_kind("train"), loaded.of_kind("eval")
    if not train or not evaluations:
        raise UserError(
            f"{run} has no evaluation yet, so no result to record: train it for longer, or lower EVAL_EVERY"
        )
    last = evaluations[-1]
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime(last["time"])),
        "config": about["name"],
        "hardware": name_hardware(about["hardware"]),
        "processes": about["plan"]["gpus"],
        "global_batch": about["plan"]["total_batch"],
        "epochs": f"{last['epoch']:g}",
        "steps": last["step"],
        "first_loss": f"{train[0].get('loss', math.nan):.4f}",
        "last_loss": f"{train[-1].get('loss', math.nan):.4f}",
        "top1": f"{last['top1']:.4f}",
        "top5": f"{last['top5']:.4f}",
        "eval_images": last["samples"],
        "minutes": f"{(loaded.seconds or 0) / 60:.1f}",
        "versions": " ".join(f"{name}={number}" for name, number in about["versions"].items() if number),
        "commit": about["commit"],
        "command": format_command(about["argv"]),
    }
