"""Train a config once for each combination of values, one run after another; print which is best
and draw a picture.

    python scripts/sweep.py --config vit_lite_vanilla --output DIR --set DATA.root=/data/cifar10 \\
        --grid TOTAL_BATCH_SIZE=256,1024 --grid LEARNING_RATE=1e-3,3e-3
    python scripts/sweep.py --output DIR --set DATA.root=/data/cifar10 \
        --grid CONFIG=vit_lite_vanilla,vit_lite_1d
    python scripts/sweep.py --output DIR      # the tables and DIR/sweep.png of the runs so far

The key CONFIG takes the place of --config. The first --grid key is the picture's x axis; values of
SEED are repetitions. A run has as many processes as its parallel mode needs, or --processes if that
is more. A folder in DIR for each run has its combination as its name; more commands may add runs to
DIR. A run that fails is in the table, the others are trained, and the exit status is 1. Rerun the
command to resume: finished runs are skipped, the others continue from their checkpoints.
"""

import argparse
import itertools
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from common.config.load import find_config, load_config
from common.config.plan import build_plan
from common.errors import UserError, command_parser, did_you_mean, format_table, print_wrapped
from common.files import ROOT
from common.launch.signals import SIGNALS, exit_code, signal_name
from common.plot import build_figure, place_legend, save_figure
from common.task import TASKS, find_task
from common.tools.report import (
    ABSENT,
    SEED,
    RecordedRun,
    find_runs,
    group_by_seed,
    load_run,
    rank_combinations,
)

CONFIG_KEY = "CONFIG"
COSTS = (
    "GB: peak memory of a process; data: share of the time waiting for images; fwd, bwd: of a "
    "step; d(loss): largest "
    "difference of the train loss from the first run's"
)
LOG_FROM = 8  # greatest / least x from which on the axis is logarithmic


def main(argv: list[str]) -> None:
    parser = command_parser(__doc__)
    parser.add_argument(
        "--config", help="a config file, or the name of a recipe; without any, only report"
    )
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="a key and its values; repeat for more keys",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key in all runs"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="holds a folder for each run"
    )
    parser.add_argument(
        "--best", metavar="KEY", help="draw only the best of the values of this key"
    )
    parser.add_argument(
        "--train", type=Path, metavar="SCRIPT", help="the task's script (default: the recipe's)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="GPUs of each run, started by torchrun (default: 1)",
    )
    args = parser.parse_args(argv)
    failed = train(args) if args.config or args.grid or args.set else {}
    runs = [load_run(folder, folder.name) for folder in find_runs(args.output)]
    if not runs:
        raise UserError(
            f"--output {args.output}: no run in it yet; start the sweep with --config and --grid"
        )
    runs.sort(key=lambda run: run.about["starts"][0]["started"])
    _check_best(args.best, [key for run in runs for key in run.values])
    rows, verdict = rank_combinations(runs, failed)
    print(format_table(rows))
    print_wrapped(COSTS, 0)
    print(format_table(tabulate_costs(runs)))
    picture = args.output / "sweep.png"
    print(
        picture if draw(runs, picture, args.best) else "no picture yet: no run has been evaluated"
    )
    print(verdict)
    if failed:
        print(f"failed: {', '.join(failed)}; rerun the command to resume", file=sys.stderr)
        sys.exit(1)


def train(args: argparse.Namespace) -> dict[str, str]:
    """Train what is missing in ``args.output``, after every combination has been checked.

    Returns a note with the exit status for each run that failed after its start, by name.
    """
    grid = dict(map(_parse_grid, args.grid))
    if len(grid) < len(args.grid):
        raise UserError("--grid: a key is named twice: put all its values into one --grid")
    if not args.config and CONFIG_KEY not in grid:
        raise UserError(
            "--grid and --set need --config, or --grid CONFIG=A,B: which recipes to train"
        )
    _check_best(args.best, list(grid))
    commands = plan_commands(args, grid)
    failed = {}
    for number, (folder, command) in enumerate(commands.items(), 1):
        finished = is_finished(folder, command)
        print(
            f"[{number}/{len(commands)}] {folder.name}{': finished already' if finished else ''}",
            flush=True,
        )
        if finished:
            continue
        status, stop = run_child(command)
        if stop:
            print(
                f"{signal_name(stop)}: {folder.name} was stopped; rerun the command to resume",
                file=sys.stderr,
            )
            sys.exit(exit_code(stop))
        if status and not (folder / "config.json").exists():
            raise UserError(
                f"{folder.name} did not start (exit status {status}, message above): the sweep "
                "ends here"
            )
        if status:
            failed[folder.name] = f" (failed, exit status {status})"
    return failed


def plan_commands(args: argparse.Namespace, grid: dict[str, list[str]]) -> dict[Path, list[str]]:
    """Return the command of each combination by its run's folder; the last key of ``grid`` changes
    fastest.

    Raises `UserError` for a combination that cannot be trained.
    """
    commands = {}
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        name = chosen.get(CONFIG_KEY) or args.config
        script, recipe = find_script(name, args.train)
        path = str(find_config(name, recipe).resolve())
        settings = [
            *args.set,
            *(f"{key}={value}" for key, value in chosen.items() if key != CONFIG_KEY),
        ]
        config = load_config(path, settings, recipe)
        processes = max(args.processes, config["parallel"]["tensor"]["size"])
        build_plan(config, processes, None)
        names = [
            re.sub(r"[^\w.=+-]+", "_", f"{key}={value}").strip("_") for key, value in chosen.items()
        ]
        folder = args.output.resolve() / (",".join(names) or "run")
        if folder in commands:
            raise UserError(
                f"--grid: two combinations would share the folder {folder.name}: choose values "
                "that differ"
            )
        torchrun = ["-m", "common.launch.signals", "--standalone", "--local_addr=127.0.0.1"]
        torchrun.append(f"--nproc_per_node={processes}")
        words = [word for setting in settings for word in ("--set", setting)]
        start = [sys.executable, *(torchrun if processes > 1 else []), str(script)]
        commands[folder] = [*start, "--config", path, *words, "--output", str(folder)]
    return commands


def run_child(command: Sequence[str]) -> tuple[int, int]:
    """Run ``command`` and forward stop signals to it; return its exit status and the first signal,
    or 0.
    """
    received: list[int] = []
    heeded = [
        number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
    ]  # by nohup
    previous = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in heeded
    }
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


def find_script(config: str, script: Path | None) -> tuple[Path, str | None]:
    """Return the training script, that of the recipe ``config`` or ``script``, and what a task's
    falls back on.

    Raises `UserError` for a config of the user's own without ``script``.
    """
    tasks = [find_task(name) for name in TASKS]
    for task in tasks:
        own = ROOT / task.script
        if script.resolve() == own if script else Path(config).stem.startswith(task.recipes):
            return own, task.recipe
    if script:
        return script.resolve(), None
    scripts = ", ".join(task.script for task in tasks)
    raise UserError(
        f"--config {find_config(config)} is no recipe: add --train SCRIPT, which is one of "
        f"{scripts}"
    )


def _parse_grid(text: str) -> tuple[str, list[str]]:
    """Return the key of ``KEY=a,b`` and its values; commas within brackets are theirs."""
    key, _, values = text.partition("=")
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    parts = [part.strip() for part in parts]
    if not key or not all(parts):
        raise UserError(f"--grid {text}: write it as KEY=VALUE,VALUE")
    return key, parts


def _check_best(best: str | None, keys: Sequence[str]) -> None:
    if best is not None and best not in keys:
        raise UserError(f"--best {best}: none of the --grid keys{did_you_mean(best, keys)}")


def is_finished(folder: Path, command: Sequence[str]) -> bool:
    """Return whether ``folder`` holds the whole run of ``command``; else the run itself decides
    what it resumes.
    """
    if not (folder / "config.json").exists():
        return False
    run = load_run(folder, folder.name)
    arguments = run.about["argv"][1:]
    is_edited = (
        Path(command[command.index("--config") + 1]).stat().st_mtime
        > (folder / "config.json").stat().st_mtime
    )
    return run.final is not None and not is_edited and list(command[-len(arguments) :]) == arguments


def tabulate_costs(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return each run's medians of memory, rate and times, and the difference of its loss; `COSTS`
    explains them.
    """
    first, rows = {line["step"]: line["loss"] for line in runs[0].of_kind("train")}, []
    for run in runs:
        lines = [line for line in run.of_kind("train") if line["step"] in first]
        differences = np.abs([line["loss"] - first[line["step"]] for line in lines])
        costs = {
            "run": ", ".join(map(str, run.values.values())) or run.name,
            "GB": run.median("peak_memory_gb", "{:.2f}"),
            "img/s": run.median("samples_per_s", "{:,.0f}"),
            "data": run.median("data_wait", "{:.1f} %"),
            "fwd ms": run.median("forward_s", "{:.1f}"),
            "bwd ms": run.median("backward_s", "{:.1f}"),
            "d(loss)": f"{differences.max():.1e}" if lines else ABSENT,
        }
        rows.append(costs)
    return rows


def draw(runs: Sequence[RecordedRun], path: Path, best: str | None = None) -> bool:
    """Draw top-1 of the finished runs against the first key, with a line for the others; False if
    there is none yet.

    Runs that differ only in `SEED` are one point, their mean, with a bar from the least to the
    greatest. ``best`` names a key of whose values only the one with the highest mean is drawn.
    """
    lines = collect_points(runs, best)
    if not lines:
        return False
    figure, axes = build_figure(7, 4.5)
    places = list(dict.fromkeys(x for points in lines.values() for x in points))
    is_numeric = not any(isinstance(x, str) for x in places)
    for number, (line, points) in enumerate(lines.items()):
        xs = sorted(points) if is_numeric else list(points)
        tops = [points[x] for x in xs]
        shown = [pair for pair in line if pair[1] != ABSENT] or line
        bars = [(mean(each) - min(each), max(each) - mean(each)) for each in tops]
        axes.errorbar(
            xs if is_numeric else list(map(str, xs)),
            list(map(mean, tops)),
            list(zip(*bars, strict=True)),
            fmt="o-" if is_numeric else "o",
            capsize=3,
            color=f"C{number}",
            label=", ".join(f"{key}={value}" for key, value in shown),
        )
    varied = [key for key in runs[0].values if key not in (SEED, best)]
    axes.set(xlabel=varied[0] if varied else "run", ylabel="top-1 of finished runs at the end, %")
    if is_numeric:
        if min(places) > 0 and max(places) / min(places) >= LOG_FROM:
            axes.set_xscale("log")
        axes.set_xticks(places, [f"{x:,}" if isinstance(x, int) else f"{x:g}" for x in places])
        axes.minorticks_off()
    if any(lines):
        longest = max(map(len, axes.get_legend_handles_labels()[1]))
        place_legend(axes, columns=2 if longest < 40 else 1)
    save_figure(figure, path)
    return True


def collect_points(
    runs: Sequence[RecordedRun], best: str | None
) -> dict[tuple, dict[Any, list[float]]]:
    """Return the final top-1 of the finished runs in per cent, by line and x; there are several if
    seeds differ.

    Of the points that differ only in the key ``best`` only the one with the highest mean stays,
    without that key.
    """
    lines = defaultdict(dict)
    for values, group in group_by_seed(runs).items():
        tops = [100 * run.final["top1"] for run in group if run.final]
        (_, x), *line = [pair for pair in values if pair[0] != best] or [("", "best")]
        points = lines[tuple(line)]
        if tops and (x not in points or mean(tops) > mean(points[x])):
            points[x] = tops
    return {line: points for line, points in lines.items() if points}
