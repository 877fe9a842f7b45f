"""Train a config once for each combination of values, and print which is best.

    python scripts/sweep.py --config vit_lite_vanilla --output DIR --set DATA.root=/data/cifar10 \\
        --grid TOTAL_BATCH_SIZE=256,1024 --grid LEARNING_RATE=1e-3,3e-3
    python scripts/sweep.py --output DIR --set DATA.root=/data/cifar10 \
        --grid CONFIG=vit_lite_vanilla,vit_lite_1d
    python scripts/sweep.py --config vit_lite_vanilla --output DIR --set DATA.root=/data/cifar10 \
        --random 20 --grid "LEARNING_RATE=log(1e-4,1e-2)" --grid WEIGHT_DECAY=0.03,0.1 --jobs 2
    python scripts/sweep.py --output DIR      # the tables and DIR/sweep.png of the runs so far

The key CONFIG takes the place of --config. The first --grid key is the picture's x axis; values of
SEED are repetitions. A run has as many processes as its parallel mode needs, or --processes if that
is more. --random N draws N combinations, of values in a list or between two ends, the same in every
command; --jobs N trains N at a time, each on its share of the GPUs and cores, with its output in
DIR/<run>.log. A folder in DIR for each run has its combination as its name; more commands may add
runs to DIR. Each run counts with its best evaluation by the config's BEST, as in checkpoints/best.
Runs of another data set are ranked apart. A run that fails, or cannot start, is named at the end;
the others are trained, and the exit status is 1. Rerun the command to resume: finished runs say so,
the others continue from their checkpoints.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from common.errors import PartialError, UserError, at_least_1, command_parser
from common.launch.signals import stop_signals
from common.process import Stopped, ends_cleanly
from common.text import did_you_mean, print_wrapped
from common.tools.report import RecordedRun
from common.tools.sweep_grid import (
    CONFIG_KEY,
    RANGE,
    RANGE_HELP,
    combine,
    parse_grid,
    plan_commands,
)
from common.tools.sweep_processes import run_all
from common.tools.sweep_ranking import (
    COSTS,
    draw,
    group_by_data,
    load_runs,
    name_best,
    other_keys,
    print_ranked,
    print_table,
    rank_combinations,
    tabulate_costs,
    values_of,
)


@ends_cleanly
def main(argv: list[str]) -> None:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--config", help="a config file, or the name of a recipe; without any, only report")
    add(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="a key and its values, with --random also log(LOW,HIGH) or uniform(LOW,HIGH); repeat "
        "for more keys",
    )
    add("--random", type=at_least_1, metavar="N", help="draw N combinations in place of all")
    add(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key in all runs"
    )
    add("--output", type=Path, required=True, metavar="DIR", help="holds a folder for each run")
    add("--jobs", type=at_least_1, default=1, metavar="N", help="runs at a time (default: 1)")
    add("--best", metavar="KEY", help="draw only the best of the values of this key")
    add("--train", type=Path, metavar="SCRIPT", help="the task's script (default: the recipe's)")
    add(
        "--processes",
        type=at_least_1,
        default=1,
        help="GPUs of each run, started by torchrun (default: 1)",
    )
    args = parser.parse_args(argv)
    failed = train(args) if args.config or args.grid or args.set or args.random else {}
    failure = f"failed: {', '.join(failed)}; rerun the command to resume what had started"
    runs = load_runs(args.output)
    if failed and not runs:
        raise PartialError(failure)
    if not runs:
        raise UserError(
            f"--output {args.output}: no run in it yet; start the sweep with --config and --grid"
        )
    _check_best(args.best, [key for run in runs for key in values_of(run)])
    keys = other_keys(runs)
    if keys:
        print_wrapped(f"warning: the commands of these runs differ in {', '.join(keys)} too")
    groups = group_by_data(runs)
    for number, group in enumerate(groups.values(), 1):
        if len(groups) > 1:
            data = group[0].metadata["data"]
            images = f"{data['train_samples']:,} training and {data['eval_samples']:,} evaluation"
            root = group[0].metadata["config"]["DATA"]["root"]
            print_wrapped(f"data set {number} of {len(groups)}: DATA.root={root}, {images} images")
        picture = "sweep.png" if number == 1 else f"sweep-{number}.png"
        report(group, failed, args.output / picture, args.best)
    if failed:
        raise PartialError(failure)


def report(
    runs: Sequence[RecordedRun], failed: Mapping[str, str], picture: Path, best: str | None
) -> None:
    """Print the tables of runs of one data set, and draw their picture."""
    ranked = rank_combinations(runs, failed)
    print_ranked(ranked)
    print_wrapped(COSTS, 0)
    print_table(tabulate_costs(runs), [values_of(run) for run in runs])
    is_drawn = draw(runs, picture, best)
    print(picture if is_drawn else "no picture yet: no run has been evaluated")
    print(name_best(ranked))


def train(args: argparse.Namespace) -> dict[str, str]:
    """Check every combination, then train them in ``args.output``.

    Returns a note with the exit status for each run that failed, or could not start, by name.
    """
    grid = dict(map(parse_grid, args.grid))
    if len(grid) < len(args.grid):
        raise UserError("--grid: a key is named twice: put all its values into one --grid")
    if not args.config and CONFIG_KEY not in grid:
        raise UserError(
            "--grid, --random and --set need --config, or --grid CONFIG=A,B: which recipes to train"
        )
    if args.random and not grid:
        raise UserError(f"--random {args.random} needs --grid KEY=log(LOW,HIGH): what to draw")
    if not args.random and any(map(RANGE.fullmatch, itertools.chain(*grid.values()))):
        raise UserError(f"--grid: {RANGE_HELP}")
    _check_best(args.best, list(grid))
    failed: dict[str, str] = {}
    planned = plan_commands(args, combine(grid, args.random), failed)
    started = time.time()
    # An error closes it too, and so ends the other runs.
    with closing(run_all(planned, min(args.jobs, len(planned)))) as ended:
        for number, (folder, status) in enumerate(ended, 1):
            has_started = (folder / "config.json").exists()
            if status:
                failed[folder.name] = f" (failed, exit status {status})"
            # A run that was finished before wrote nothing, and has changed nothing in the table.
            has_trained = status or (folder / "metrics.jsonl").stat().st_mtime > started
            if has_started and has_trained and number < len(planned):
                for group in group_by_data(load_runs(args.output)).values():
                    print_ranked(rank_combinations(group, failed))
    if stop_signals.received:
        print("the sweep was stopped; rerun the command to resume", file=sys.stderr)
        raise Stopped(stop_signals.received)
    return failed


def _check_best(best: str | None, keys: Sequence[str]) -> None:
    """Raise `UserError` unless ``best``, if there is one, is among the ``keys`` of the grid."""
    if best is not None and best not in keys:
        raise UserError(f"--best {best}: none of the --grid keys{did_you_mean(best, keys)}")
