"""Train a config once for each combination of values, and print which is best.

    python scripts/sweep.py --config vit_lite_vanilla --output DIR --set DATA.root=/data/cifar10 \\
        --grid TOTAL_BATCH_SIZE=256,1024 --grid LEARNING_RATE=1e-3,3e-3
    python scripts/sweep.py --output DIR --set DATA.root=/data/cifar10 \
        --grid CONFIG=vit_lite_vanilla,vit_lite_1d
    python scripts/sweep.py --output DIR      # the tables and DIR/sweep.png of the runs so far

The key CONFIG takes the place of --config. The first --grid key is the picture's x axis; values of
SEED are repetitions. A run has as many processes as its parallel mode needs, or --processes if that
is more. A folder in DIR for each run has its combination as its name; more commands may add runs to
DIR. A run that fails is in the table, the others are trained, and the exit status is 1. Rerun the
command to resume: finished runs say so, the others continue from their checkpoints.
"""

import argparse
import itertools
import math
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.config.load import find_config, load_config
from common.config.plan import build_plan
from common.errors import UserError, command_parser
from common.files import ROOT
from common.launch.signals import SIGNALS, exit_code, signal_name
from common.plot import build_figure, place_legend, save_figure
from common.task import TASKS, find_task
from common.text import did_you_mean, format_table, print_wrapped
from common.tools.report import ABSENT, RecordedRun, find_runs, load_run

CONFIG_KEY = "CONFIG"
SEED = "SEED"  # the key whose values are repetitions
COSTS = (
    "GB: peak memory of a process; data: share of the time waiting for images; fwd, bwd: of a "
    "step; d(loss): largest difference of the train loss from the first run's"
)
LOG_FROM = 8  # the x axis is logarithmic where its greatest value is this many times the least


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
    # Costs are compared with those of the run that was started first.
    runs.sort(key=lambda run: run.about["starts"][0]["started"])
    _check_best(args.best, [key for run in runs for key in values_of(run)])
    rows, verdict = rank_combinations(runs, failed)
    print(format_table(rows))
    print_wrapped(COSTS, 0)
    print(format_table(tabulate_costs(runs)))
    picture = args.output / "sweep.png"
    is_drawn = draw(runs, picture, args.best)
    print(picture if is_drawn else "no picture yet: no run has been evaluated")
    print(verdict)
    if failed:
        print(f"failed: {', '.join(failed)}; rerun the command to resume", file=sys.stderr)
        sys.exit(1)


def train(args: argparse.Namespace) -> dict[str, str]:
    """Check every combination, then train them in ``args.output``.

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
        print(f"[{number}/{len(commands)}] {folder.name}", flush=True)
        status, stop = run_child(command)
        if stop:
            stopped = f"{signal_name(stop)}: {folder.name} was stopped"
            print(f"{stopped}; rerun the command to resume", file=sys.stderr)
            sys.exit(exit_code(stop))
        # A mistake that ends a run before its first step is likely to end all.
        if status and not (folder / "config.json").exists():
            raise UserError(
                f"{folder.name} did not start (exit status {status}, message above): the sweep "
                "ends here"
            )
        if status:
            failed[folder.name] = f" (failed, exit status {status})"
    return failed


def plan_commands(args: argparse.Namespace, grid: dict[str, list[str]]) -> dict[Path, list[str]]:
    """Return the command of each combination by its run's folder.

    The last key of ``grid`` changes fastest. Raises `UserError` for a combination that cannot be
    trained.
    """
    commands = {}
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        name = chosen.get(CONFIG_KEY) or args.config
        script, recipe = find_script(name, args.train)
        path = str(find_config(name, recipe).resolve())
        settings = list(args.set)
        settings += [f"{key}={value}" for key, value in chosen.items() if key != CONFIG_KEY]
        config = load_config(path, settings, recipe)
        processes = max(args.processes, config["parallel"]["tensor"]["size"])
        build_plan(config, processes, None)  # it refuses a batch that does not divide
        folder = args.output.resolve() / name_run(chosen)
        if folder in commands:
            raise UserError(
                f"--grid: two combinations would share the folder {folder.name}: choose values "
                "that differ"
            )
        command = [sys.executable]
        if processes > 1:
            # Our own torchrun. It gets an address, since a host's name may not resolve.
            command += ["-m", "common.launch.signals", "--standalone", "--local_addr=127.0.0.1"]
            command.append(f"--nproc_per_node={processes}")
        command += [str(script), "--config", path]
        for setting in settings:
            command += ["--set", setting]
        commands[folder] = [*command, "--output", str(folder)]
    return commands


def name_run(values: Mapping[str, str]) -> str:
    """Return the name of a combination's folder, without characters that shells treat specially."""
    parts = [
        re.sub(r"[^\w.=+-]+", "_", f"{key}={value}").strip("_") for key, value in values.items()
    ]
    return ",".join(parts) or "run"


def run_child(command: Sequence[str]) -> tuple[int, int]:
    """Run ``command`` and forward stop signals to it.

    Returns its exit status and the first signal, or 0.
    """
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(number)

    previous = {}
    for number in SIGNALS:
        # Under nohup SIGHUP stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, receive)
    try:
        child = subprocess.Popen(command)
        forwarded = 0
        while child.poll() is None:
            for number in received[forwarded:]:
                child.send_signal(number)
                forwarded += 1
            time.sleep(0.1)
        return child.returncode, next(iter(received), 0)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def find_script(config: str, script: Path | None) -> tuple[Path, str | None]:
    """Return the training script for ``config``, and the recipe whose values a config may lack.

    The script is that of the recipe ``config``, or ``script``. Raises `UserError` for a config of
    the user's own without ``script``.
    """
    tasks = [find_task(name) for name in TASKS]
    for task in tasks:
        path = ROOT / task.script
        is_recipe = Path(config).stem.startswith(task.recipes)
        if script.resolve() == path if script else is_recipe:
            return path, task.recipe
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
    parts = [""]
    depth = 0  # open brackets before this letter
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
    """Raise `UserError` unless ``best``, if there is one, is among the ``keys`` of the grid."""
    if best is not None and best not in keys:
        raise UserError(f"--best {best}: none of the --grid keys{did_you_mean(best, keys)}")


def values_of(run: RecordedRun) -> dict[str, int | float | str]:
    """Return the values in the name of a sweep's run, ``KEY=VALUE,KEY=VALUE``."""
    values = {}
    for part in run.name.split(","):
        key, equals, value = part.partition("=")
        if equals:
            values[key] = _number(value)
    return values


def _number(text: str) -> int | float | str:
    """Return the number that ``text`` is, or ``text``."""
    for number_type in (int, float):
        with suppress(ValueError):
            return number_type(text)
    return text


class Ranked(NamedTuple):
    """A combination of a sweep's values."""

    score: float  # mean top-1 of the finished runs in per cent, or -1 if a loss is not finite
    tops: list[float]  # top-1 of the finished runs in per cent
    values: dict[str, Any]
    row: dict[str, Any]  # its row of the table


def rank_combinations(
    runs: Sequence[RecordedRun], notes: Mapping[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """Return a row for each combination of a sweep's values, the best first, and which is best.

    Runs that differ only in `SEED` share a row: the mean of their final top-1, its range, and how
    many they are. ``notes``: what to add to its steps, by a run's name.
    """
    ranked = []
    for values, group in group_by_seed(runs).items():
        ends = [run.final for run in group if run.final]
        tops = [100 * end["top1"] for end in ends]
        steps = [run.steps + notes.get(run.name, "") for run in group]
        mean = shown_range = shown_loss = ABSENT
        score = -math.inf
        if ends:
            loss = statistics.mean(end["loss"] for end in ends)
            mean = f"{statistics.mean(tops):.2f}%"
            shown_range = f"{min(tops):.2f}-{max(tops):.2f}"
            shown_loss = f"{loss:.3f}"
            # A run that has diverged is never the best, whatever its NaNs were counted as.
            score = statistics.mean(tops) if math.isfinite(loss) else -1.0
        reached = {
            "top1": mean,
            "range": shown_range,
            "n": len(ends),
            "loss": shown_loss,
            "steps": ", ".join(dict.fromkeys(steps)),
        }
        ranked.append(Ranked(score, tops, dict(values), dict(values) | reached))
    ranked.sort(key=lambda entry: -entry.score)
    return [entry.row for entry in ranked], _name_best(ranked)


def _name_best(ranked: Sequence[Ranked]) -> str:
    """Return a line that names the best of several combinations and compares it to the second."""
    if len(ranked) < 2:
        return ""
    best, second, *_ = ranked
    if not second.tops or best.score < 0:
        return ""
    if second.score < 0:
        verdict = "the loss of the others is not finite"
    elif len(best.tops) == len(second.tops) == 1:
        verdict = f"no ranges: repeat it with --grid {SEED}=1,2,3"
    elif max(second.tops) >= min(best.tops):
        verdict = "ranges overlap"
    else:
        verdict = "ranges do not overlap"
    named = ", ".join(f"{key}={value}" for key, value in best.values.items())
    return f"best: {named}; {verdict}"


def group_by_seed(
    runs: Sequence[RecordedRun],
) -> dict[tuple[tuple[str, Any], ...], list[RecordedRun]]:
    """Return the runs by the (key, value) of what the sweep varies but `SEED`."""
    groups = defaultdict(list)
    keys = dict.fromkeys(key for run in runs for key in values_of(run))
    for run in runs:
        # A run of another command may lack a key.
        values = {key: values_of(run).get(key, ABSENT) for key in keys if key != SEED}
        if not keys:
            values = {"run": run.name}
        groups[tuple(values.items())].append(run)
    return groups


def tabulate_costs(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return a row of costs for each run, which `COSTS` explains."""
    first = {record["step"]: record["loss"] for record in runs[0].of_kind("train")}
    rows = []
    for run in runs:
        differences = [
            abs(record["loss"] - first[record["step"]])
            for record in run.of_kind("train")
            if record["step"] in first
        ]
        row = {
            "run": ", ".join(map(str, values_of(run).values())) or run.name,
            "GB": run.median("peak_memory_gb", "{:.2f}"),
            "img/s": run.median("samples_per_s", "{:,.0f}"),
            "data": run.median("data_wait", "{:.1f} %"),
            "fwd ms": run.median("forward_s", "{:.1f}"),
            "bwd ms": run.median("backward_s", "{:.1f}"),
            # NumPy's maximum is NaN if one value is.
            "d(loss)": f"{np.max(differences):.1e}" if differences else ABSENT,
        }
        rows.append(row)
    return rows


def draw(runs: Sequence[RecordedRun], path: Path, best: str | None = None) -> bool:
    """Draw the final top-1 of the finished runs against the first key; return False without any.

    The other keys give a line each. Runs that differ only in `SEED` are one point, their mean, with
    a bar from the least to the greatest. ``best`` names a key of whose values only the one with the
    highest mean is drawn.
    """
    lines = collect_points(runs, best)
    if not lines:
        return False
    figure, axes = build_figure(7, 4.5)
    ticks = list(dict.fromkeys(itertools.chain.from_iterable(lines.values())))
    is_numeric = not any(isinstance(x, str) for x in ticks)
    for line, points in lines.items():
        xs = sorted(points) if is_numeric else list(points)
        means = [statistics.mean(points[x]) for x in xs]
        below = [statistics.mean(points[x]) - min(points[x]) for x in xs]
        above = [max(points[x]) - statistics.mean(points[x]) for x in xs]
        shown = [pair for pair in line if pair[1] != ABSENT] or line
        axes.errorbar(
            # Numbers among texts are drawn as texts too.
            xs if is_numeric else [*map(str, xs)],
            means,
            [below, above],
            fmt="o-" if is_numeric else "o",
            capsize=3,
            label=", ".join(f"{key}={value}" for key, value in shown),
        )
    varied = [key for key in values_of(runs[0]) if key not in (SEED, best)]
    axes.set(xlabel=varied[0] if varied else "run", ylabel="top-1 of finished runs at the end, %")
    if is_numeric:
        if min(ticks) > 0 and max(ticks) / min(ticks) >= LOG_FROM:
            axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{x:,}" if isinstance(x, int) else f"{x:g}" for x in ticks])
        axes.minorticks_off()
    if any(lines):  # A single line has no other key that names it.
        longest = max(map(len, axes.get_legend_handles_labels()[1]))
        place_legend(axes, columns=2 if longest < 40 else 1)
    save_figure(figure, path)
    return True


def collect_points(
    runs: Sequence[RecordedRun], best: str | None
) -> dict[tuple, dict[Any, list[float]]]:
    """Return the final top-1 of the finished runs in per cent, one of each seed, by line and x.

    A line is the (key, value) of all but the first key. Of the points that differ only in the key
    ``best``, only the one with the highest mean stays.
    """
    lines = defaultdict(dict)
    for values, group in group_by_seed(runs).items():
        tops = [100 * run.final["top1"] for run in group if run.final]
        pairs = [pair for pair in values if pair[0] != best] or [("", "best")]
        (_, x), *line = pairs
        points = lines[tuple(line)]
        if tops and (x not in points or statistics.mean(tops) > statistics.mean(points[x])):
            points[x] = tops
    return {line: points for line, points in lines.items() if points}
