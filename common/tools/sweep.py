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
A run that fails is in the table, the others are trained, and the exit status is 1. Rerun the
command to resume: finished runs say so, the others continue from their checkpoints.
"""

import argparse
import itertools
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common.config.load import find_config, load_config
from common.config.plan import build_plan
from common.errors import PartialError, UserError, at_least_1, command_parser
from common.files import ROOT
from common.launch.signals import stop_signals
from common.metrics.metrics_file import CHARTS
from common.metrics.plot import build_figure, place_legend, save_figure
from common.process import Stopped, ends_cleanly
from common.task import TASKS, find_task
from common.text import did_you_mean, format_table, print_wrapped
from common.tools.report import ABSENT, RecordedRun, find_runs, load_run

CONFIG_KEY = "CONFIG"
SEED = "SEED"  # the key whose values are repetitions
COSTS = (
    "first table: each run's best evaluation by BEST, as in checkpoints/best; GB: peak memory of a "
    "process; data: share of the time waiting for images; fwd, bwd: of a step; d(loss): largest "
    "difference of the train loss from the first run's"
)
MOST_NAMED = 10  # most lines of the picture that a legend names
MOST_TICKS = 6  # most values on its x axis with a tick each
RANGE_HELP = "write log(LOW,HIGH) of positive numbers or uniform(LOW,HIGH), with --random N"
RANGE = re.compile(r"(\w+)\(([^()=]+)\)")  # and not dict(KEY=VALUE)


class Planned(NamedTuple):
    """The command of a run, and the processes that it starts."""

    command: list[str]
    processes: int


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
    runs = load_runs(args.output)
    if not runs:
        raise UserError(
            f"--output {args.output}: no run in it yet; start the sweep with --config and --grid"
        )
    _check_best(args.best, [key for run in runs for key in values_of(run)])
    ranked = rank_combinations(runs, failed)
    print(format_table([entry.row for entry in ranked]))
    print_wrapped(COSTS, 0)
    print(format_table(tabulate_costs(runs)))
    picture = args.output / "sweep.png"
    is_drawn = draw(runs, picture, args.best)
    print(picture if is_drawn else "no picture yet: no run has been evaluated")
    print(name_best(ranked))
    if failed:
        raise PartialError(f"failed: {', '.join(failed)}; rerun the command to resume")


def load_runs(output: Path) -> list[RecordedRun]:
    """Return the runs in a sweep's folder, in the order of their starts."""
    runs = [load_run(folder, folder.name) for folder in find_runs(output)]
    return sorted(runs, key=lambda run: run.about["starts"][0]["started"])


def train(args: argparse.Namespace) -> dict[str, str]:
    """Check every combination, then train them in ``args.output``.

    Returns a note with the exit status for each run that failed after its start, by name.
    """
    grid = dict(map(_parse_grid, args.grid))
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
    planned = plan_commands(args, combine(grid, args.random))
    failed: dict[str, str] = {}
    started = time.time()
    # An error closes it too, and so ends the other runs.
    with closing(run_all(planned, min(args.jobs, len(planned)))) as ended:
        for number, (folder, status) in enumerate(ended, 1):
            # A mistake that ends a run before its first step is likely to end all.
            if status and not (folder / "config.json").exists():
                raise UserError(
                    f"{folder.name} did not start (exit status {status}, message above): the sweep "
                    "ends here"
                )
            if status:
                failed[folder.name] = f" (failed, exit status {status})"
            # A run that was finished before wrote nothing, and has changed nothing in the table.
            has_trained = status or (folder / "metrics.jsonl").stat().st_mtime > started
            if has_trained and number < len(planned):
                ranked = rank_combinations(load_runs(args.output), failed)
                print(format_table([entry.row for entry in ranked]), flush=True)
    if stop_signals.received:
        print("the sweep was stopped; rerun the command to resume", file=sys.stderr)
        raise Stopped(stop_signals.received)
    return failed


def combine(grid: Mapping[str, list[str]], draws: int | None) -> list[dict[str, str]]:
    """Return the values of each run: all combinations, or those of ``draws`` draws, each once.

    The last key changes fastest. A draw is trained with every value of `SEED`. More draws begin
    with the same ones.
    """
    grids = [grid]
    if draws:
        # Of its methods only `random` is promised to be the same in every version of Python.
        generator = random.Random(0)
        grids = []
        for _ in range(draws):
            drawn = {key: [_draw(key, values, generator)] for key, values in grid.items()}
            if SEED in grid:
                drawn[SEED] = grid[SEED]
            # Lists have few combinations: two draws may be equal.
            if drawn not in grids:
                grids.append(drawn)
    products = [itertools.product(*one.values()) for one in grids]
    return [dict(zip(grid, values, strict=True)) for values in itertools.chain(*products)]


def _draw(key: str, values: Sequence[str], generator: random.Random) -> str:
    """Return one of the values, or a number within it if it is a range."""
    value = values[int(len(values) * generator.random())]
    found = RANGE.fullmatch(value)
    if not found:
        return value
    try:
        scale, inverse = {"log": (math.log, math.exp), "uniform": (float, float)}[found[1]]
        low, high = (scale(float(end)) for end in found[2].split(","))
    except (KeyError, ValueError) as error:
        raise UserError(f"--grid {key}={value}: {RANGE_HELP}") from error
    return f"{inverse(low + (high - low) * generator.random()):.4g}"


def plan_commands(
    args: argparse.Namespace, combinations: Sequence[dict[str, str]]
) -> dict[Path, Planned]:
    """Return the command of each combination by its run's folder.

    Raises `UserError` for a combination that cannot be trained.
    """
    planned: dict[Path, Planned] = {}
    for chosen in combinations:
        name = chosen.get(CONFIG_KEY) or args.config
        script, recipe = find_script(name, args.train)
        path = str(find_config(name, recipe).resolve())
        settings = list(args.set)
        settings += [f"{key}={value}" for key, value in chosen.items() if key != CONFIG_KEY]
        config = load_config(path, settings, recipe)
        processes = max(args.processes, config["parallel"]["tensor"]["size"])
        build_plan(config, processes, None)  # it refuses a batch that does not divide
        folder = args.output.resolve() / name_run(chosen)
        if folder in planned:
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
        planned[folder] = Planned([*command, "--output", str(folder)], processes)
    return planned


def name_run(values: Mapping[str, str]) -> str:
    """Return the name of a combination's folder, without characters that shells treat specially."""
    parts = [
        re.sub(r"[^\w.=+-]+", "_", f"{key}={value}").strip("_") for key, value in values.items()
    ]
    return ",".join(parts) or "run"


def run_all(planned: Mapping[Path, Planned], jobs: int) -> Generator[tuple[Path, int]]:
    """Run the commands, ``jobs`` at a time; yield folder and exit status of each that ends.

    A signal ends the iterator. At its end those that still run get the signal, or SIGTERM, and time
    to write their checkpoints.
    """
    # Places of one size, so that any run may take the next that is free.
    free = divide_machine(jobs, max(run.processes for run in planned.values()))
    waiting = list(planned.items())
    running = []
    stop_signals.install()
    # Without it a signal would end this process at once, and leave the runs alone with it.
    stop_signals.deferring = True
    try:
        # Looked at right after the sleep: a child may have ended by the same Ctrl-C.
        while (running or waiting) and not stop_signals.received:
            for ended in [entry for entry in running if entry[-1].poll() is not None]:
                running.remove(ended)
                folder, place, log, child = ended
                free.append(place)
                if log and child.returncode:
                    print(f"{log}:", *log.read_text().splitlines()[-3:], sep="\n", file=sys.stderr)
                yield folder, child.returncode
            while free and waiting:
                folder, run = waiting.pop(0)
                place = free.pop(0)
                print(f"[{len(planned) - len(waiting)}/{len(planned)}] {folder.name}", flush=True)
                log = folder.with_name(f"{folder.name}.log") if jobs > 1 else None
                running.append((folder, place, log, _start(run, *place, log)))
            time.sleep(0.1)
    finally:
        for *_, child in running:
            child.send_signal(stop_signals.received or signal.SIGTERM)
        # One after the other is enough: all have the signal, and save at the same time.
        for *_, child in running:
            child.wait()
        stop_signals.restore()


def divide_machine(jobs: int, processes: int) -> list[tuple[list[int], list[str]]]:
    """Return the cores and the GPUs of each of ``jobs`` runs at a time, of ``processes`` each.

    Raises `UserError` where a run would have too few GPUs, or without any no core.
    """
    # Counts what CUDA_VISIBLE_DEVICES leaves, and creates no context on a GPU.
    visible = torch.cuda.device_count()
    every = ",".join(map(str, range(visible)))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")[:visible]
    cpus = sorted(os.sched_getaffinity(0))
    room = visible // processes if visible else len(cpus)
    if jobs > room:
        raise UserError(
            f"--jobs {jobs}: {visible} GPUs and {len(cpus)} cores are enough for --jobs {room}"
        )
    parts = zip(np.array_split(cpus, jobs), np.array_split(gpus, jobs), strict=True)
    return [(own_cpus.tolist(), own_gpus.tolist()) for own_cpus, own_gpus in parts]


def _start(
    run: Planned, cpus: list[int], gpus: list[str], log: Path | None
) -> subprocess.Popen[bytes]:
    """Start a run on its cores and GPUs, with its output at the end of ``log``."""
    environ = dict(os.environ)
    if gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[: run.processes])
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
    # A run's threads and its loader's workers are as many as the cores that it may use.
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)  # the child inherits it
    with log.open("ab") if log else nullcontext() as output:
        child = subprocess.Popen(run.command, env=environ, stdout=output, stderr=output)
    os.sched_setaffinity(0, every)
    return child


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
    pairs = [part.split("=", 1) for part in run.name.split(",") if "=" in part]
    return {key: _number(value) for key, value in pairs} or {"run": run.name}


def _number(text: str) -> int | float | str:
    """Return the number that ``text`` is, or ``text``."""
    for number_type in (int, float):
        with suppress(ValueError):
            return number_type(text)
    return text


class Ranked(NamedTuple):
    """A combination of a sweep's values."""

    score: float  # the mean of ``measured``, of a loss negative; -inf if a loss is not finite
    measured: list[float]  # the metric of the finished runs at their best, scaled as in `CHARTS`
    values: dict[str, Any]
    row: dict[str, Any]  # its row of the table


def rank_combinations(runs: Sequence[RecordedRun], notes: Mapping[str, str]) -> list[Ranked]:
    """Return the combinations of a sweep's values, the best first.

    Runs that differ only in `SEED` are one: the mean of the metric in the best evaluation of each,
    its range, and how many they are. ``notes``: what to add to its steps, by a run's name.
    """
    metric = runs[0].metric
    scale = CHARTS[metric].scale
    unit = "%" if scale == 100 else ""
    digits = 2 if unit else 3
    keys = dict.fromkeys(key for run in runs for key in values_of(run) if key != SEED)
    groups = defaultdict(list)
    for run in runs:
        known = values_of(run)
        # A run of another command may lack a key.
        groups[tuple((key, known.get(key, ABSENT)) for key in keys)].append(run)
    ranked = []
    for values, group in groups.items():
        bests = [run.best for run in group if run.final]
        measured = [scale * best.get(metric, math.nan) for best in bests]
        steps = dict.fromkeys(run.steps + notes.get(run.name, "") for run in group)
        shown_mean = shown_range = shown_loss = ABSENT
        score = -math.inf
        if bests:
            mean = statistics.mean(measured)
            loss = statistics.mean(best["loss"] for best in bests)
            shown_mean = f"{mean:.{digits}f}{unit}"
            shown_range = f"{min(measured):.{digits}f}-{max(measured):.{digits}f}"
            shown_loss = f"{loss:.3f}"
            # A run that has diverged is never the best, whatever its NaNs were counted as.
            if math.isfinite(mean + loss):
                score = -mean if metric == "loss" else mean
        row = dict(values)
        row |= {metric: shown_mean, "range": shown_range, "n": len(bests), "loss": shown_loss}
        row["steps"] = ", ".join(steps)
        ranked.append(Ranked(score, measured, dict(values), row))
    return sorted(ranked, key=lambda entry: (len(entry.measured) > 0, entry.score), reverse=True)


def name_best(ranked: Sequence[Ranked]) -> str:
    """Return a line that names the best of several combinations and compares it to the second."""
    if len(ranked) < 2:
        return ""
    best, second, *_ = ranked
    if not second.measured or not math.isfinite(best.score):
        return ""
    if not math.isfinite(second.score):
        verdict = "the loss of the others is not finite"
    elif len(best.measured) == len(second.measured) == 1:
        verdict = f"no ranges: repeat it with --grid {SEED}=1,2,3"
    else:
        ranges = best.measured, second.measured
        overlap = max(map(min, ranges)) <= min(map(max, ranges))
        verdict = "ranges overlap" if overlap else "ranges do not overlap"
    named = ", ".join(f"{key}={value}" for key, value in best.values.items())
    return f"best: {named}; {verdict}"


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
            "run": ", ".join(map(str, values_of(run).values())),
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
    """Draw the best metric of the finished runs against the first key; return False without any.

    The other keys give a line each, through the means of the runs that differ only in `SEED`. A bar
    goes from the least of them to the greatest. Draws of --random are points without a line.
    ``best`` names a key of whose values only the best one is drawn.
    """
    lines = defaultdict(dict)
    x_name = "run"
    for entry in rank_combinations(runs, {}):
        pairs = [pair for pair in entry.values.items() if pair[0] != best] or [("run", "best")]
        # The first key that varies is the x axis, the values of the others name the line.
        (x_name, x), *line = pairs
        if entry.measured:
            # Of those that differ only in the key ``best``, the best one comes first.
            lines[tuple(line)].setdefault(x, entry.measured)
    if not lines:
        return False
    figure, axes = build_figure(7, 4.5)
    ticks = list(dict.fromkeys(itertools.chain.from_iterable(lines.values())))
    is_numeric = not any(isinstance(x, str) for x in ticks)
    # A draw is known by its four digits: the record does not tell. Its neighbours differ in other
    # keys too, so that a line would say nothing.
    is_grid = is_numeric and len(ticks) <= MOST_TICKS
    is_grid = is_grid and not any(x % 1 and float(f"{x:.3g}") != x for x in ticks)
    for line, points in lines.items():
        # Numbers among texts are drawn as texts too.
        xs = sorted(points) if is_numeric else list(points)
        values = [points[x] for x in xs]
        places = xs if is_numeric else [*map(str, xs)]
        label = ", ".join(f"{key}={value}" for key, value in line)
        form = "o-" if is_grid else "o"
        (drawn,) = axes.plot(places, [*map(statistics.mean, values)], form, label=label)
        axes.vlines(places, [*map(min, values)], [*map(max, values)], drawn.get_color())
    title = CHARTS[runs[0].metric].title
    axes.set(xlabel=x_name, ylabel=f"{title}, best evaluation")
    if is_numeric:
        if min(ticks) > 0:
            axes.set_xscale("log")
        if is_grid:
            axes.set_xticks(ticks, map(str, ticks))
            axes.minorticks_off()
    if 1 < len(lines) <= MOST_NAMED:
        place_legend(axes)
    save_figure(figure, path)
    return True
