"""Train a config once for each combination of values, one run after another; print a table and draw a picture.

    python scripts/sweep.py --config vit_lite_vanilla --output DIR --set DATA.root=/data/cifar10 \\
        --grid TOTAL_BATCH_SIZE=256,1024 --grid LEARNING_RATE=1e-3,3e-3
    python scripts/sweep.py --output DIR      # the table and DIR/sweep.png of the runs so far

The first --grid key is the picture's x axis. A folder in DIR for each run has its combination as its name; more
commands may add runs to DIR. A run that fails is in the table, the others are trained, and the exit status is 1. Rerun
the command to resume: finished runs are skipped, the others continue from their checkpoints.
"""

import argparse
import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.config.load import find_config, load_config
from common.config.plan import build_plan
from common.errors import UserError, command_parser, did_you_mean
from common.files import ROOT
from common.launch.stop_signals import SIGNALS, exit_code, signal_name
from common.table import format_table
from common.task import TASKS, find_task
from common.tools.sweep_results import draw, is_finished, read_sweep, tabulate


def main(argv: list[str]) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--config", help="a config file, or the name of a recipe; without it, only report")
    parser.add_argument(
        "--grid", action="append", default=[], metavar="KEY=A,B", help="a key and its values; repeat for more keys"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key in all runs")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="holds a folder for each run")
    parser.add_argument("--best", metavar="KEY", help="draw only the best of the values of this --grid key")
    parser.add_argument("--train", type=Path, metavar="SCRIPT", help="the task's script (default: the recipe's)")
    parser.add_argument("--processes", type=int, default=1, help="GPUs of each run, started by torchrun (default: 1)")
    args = parser.parse_args(argv)
    if not args.config and (args.grid or args.set):
        raise UserError("--grid and --set need --config: which recipe to train")
    if args.config and args.best is not None:
        lines = [text.partition("=")[0] for text in (*args.grid[1:], *args.set)]
        if args.best not in lines:
            hint = did_you_mean(args.best, lines)
            raise UserError(f"--best {args.best}: none of the --grid keys beside the first{hint}")
    failed = train(args) if args.config else {}
    report(args.output, args.best, failed)
    if failed:
        print(f"failed: {', '.join(failed)}; rerun the command to resume", file=sys.stderr)
        sys.exit(1)


def train(args: argparse.Namespace) -> dict[str, int]:
    """Train what is missing in ``args.output``, after every combination has been checked.

    Returns the exit statuses of the runs that failed after their start, by name.
    """
    if args.processes < 1:
        raise UserError(f"--processes {args.processes}: choose 1 or more")
    script = args.train or find_script(args.config)
    if not script.is_file():
        raise UserError(f"--train {script}: no such file; name a task's script, such as imagenet_dali/train_dali.py")
    jobs = plan_jobs(args.config, args.set, args.grid, args.output, args.processes)
    failed = {}
    for number, (folder, arguments) in enumerate(jobs.items(), 1):
        finished = is_finished(folder, arguments)
        print(f"[{number}/{len(jobs)}] {folder.name}{': finished already' if finished else ''}", flush=True)
        if finished:
            continue
        status, stop = run_child([*_launcher(args.processes), str(script.resolve()), *arguments])
        if stop:
            print(f"{signal_name(stop)}: {folder.name} was stopped; rerun the command to resume", file=sys.stderr)
            sys.exit(exit_code(stop))
        if status and not (folder / "config.json").exists():
            raise UserError(f"{folder.name} did not start (exit status {status}, message above): the sweep ends here")
        if status:
            failed[folder.name] = status
    return failed


def plan_jobs(
    config: str, settings: Sequence[str], grids: Sequence[str], output: Path, processes: int
) -> dict[Path, list[str]]:
    """Return the training script's arguments by run folder, for each combination of the ``grids`` (``KEY=a,b``).

    The last grid changes fastest. Raises `UserError` for a combination that ``processes`` cannot train.
    """
    axes = [_parse_grid(grid) for grid in grids]
    keys = [key for key, _ in axes]
    for key in keys:
        if keys.count(key) > 1 or any(setting.startswith(f"{key}=") for setting in settings):
            raise UserError(f"--grid {key}: named twice; put all its values into one --grid, and none into --set")
    path = str(find_config(config).resolve())
    jobs = {}
    for values in itertools.product(*(values for _, values in axes)):
        chosen = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        build_plan(load_config(path, [*settings, *chosen]), processes, None)
        folder = output.resolve() / (",".join(re.sub(r"[^\w.=+-]", "_", part) for part in chosen) or "run")
        if folder in jobs:
            raise UserError(f"--grid: two combinations would share the folder {folder.name}: choose values that differ")
        words = [word for setting in [*settings, *chosen] for word in ("--set", setting)]
        jobs[folder] = ["--config", path, *words, "--output", str(folder)]
    return jobs


def run_child(command: Sequence[str]) -> tuple[int, int]:
    """Run ``command`` and forward stop signals to it; return its exit status and the first signal, or 0."""
    received: list[int] = []
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # by nohup
    previous = {number: signal.signal(number, lambda number, _: received.append(number)) for number in heeded}
    try:
        child, forwarded = subprocess.Popen(command), 0
        while (status := child.poll()) is None:
            for number in received[forwarded:]:
                child.send_signal(number)
                forwarded += 1
            time.sleep(0.1)
        return status, next(iter(received), 0)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def report(output: Path, best: str | None, failed: Mapping[str, int]) -> None:
    """Print the table of the runs in ``output`` and draw ``output/sweep.png``."""
    runs = read_sweep(output)
    print(format_table(tabulate(runs, failed)))
    picture = output / "sweep.png"
    try:
        print(picture if draw(runs, picture, best) else "no picture yet: no run has been evaluated")
    except OSError as error:
        raise UserError(f"{picture}: {error.strerror}; free space, or make the folder writable") from error


def find_script(config: str) -> Path:
    """Return the training script of the recipe ``config``; raise `UserError` for a config of the user's own."""
    tasks = [find_task(name) for name in TASKS]
    for task in tasks:
        if Path(config).stem.startswith(task.recipes):
            return ROOT / task.script
    scripts = ", ".join(task.script for task in tasks)
    raise UserError(f"--config {config} is no recipe of configs/: add --train SCRIPT, which is one of {scripts}")


def _parse_grid(text: str) -> tuple[str, list[str]]:
    """Return the key of ``KEY=a,b`` and its values; commas within brackets are theirs."""
    key, equals, values = text.partition("=")
    parts = [part.strip() for part in re.split(r",(?![^(\[{]*[)\]}])", values)]
    if not equals or not key or not all(parts) or len(set(parts)) < len(parts):
        raise UserError(f"--grid {text}: write it as KEY=VALUE,VALUE with values that differ")
    return key, parts


def _launcher(processes: int) -> list[str]:
    torchrun = ["-m", "common.launch.torchrun", "--standalone", "--nproc_per_node", str(processes)]
    return [sys.executable, *(torchrun if processes > 1 else [])]
