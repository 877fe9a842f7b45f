"""The combinations of a sweep: the values of --grid, and the command of each run."""

import argparse
import itertools
import math
import random
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from common.config.load import find_config, load_config
from common.config.plan import build_plan
from common.errors import UserError
from common.files import ROOT
from common.task import TASKS, find_task
from common.text import print_wrapped

CONFIG_KEY = "CONFIG"
SEED = "SEED"  # the key whose values are repetitions
RANGE_HELP = "write log(LOW,HIGH) of positive numbers or uniform(LOW,HIGH), with --random N"
RANGE = re.compile(r"(\w+)\(([^()=]+)\)")  # and not dict(KEY=VALUE)


class Planned(NamedTuple):
    """The command of a run, and the processes that it starts."""

    command: list[str]
    processes: int


def parse_grid(text: str) -> tuple[str, list[str]]:
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
    match = RANGE.fullmatch(value)
    if not match:
        return value
    try:
        scale, inverse = {"log": (math.log, math.exp), "uniform": (float, float)}[match[1]]
        low, high = (scale(float(end)) for end in match[2].split(","))
    except (KeyError, ValueError) as error:
        raise UserError(f"--grid {key}={value}: {RANGE_HELP}") from error
    return f"{inverse(low + (high - low) * generator.random()):.4g}"


def plan_commands(
    args: argparse.Namespace, combinations: Sequence[dict[str, str]], failed: dict[str, str]
) -> dict[Path, Planned]:
    """Return the command of each combination by its run's folder, the same values once.

    What cannot be trained is said, and its name added to ``failed``. Raises `UserError` if all of
    it is refused.
    """
    planned: dict[Path, Planned] = {}
    configs: dict[Path, tuple[str, dict[str, Any]]] = {}
    # The same value may be written otherwise in an earlier command.
    folders = _find_folders(args.output.resolve())
    mistakes = []
    for chosen in combinations:
        name = chosen.get(CONFIG_KEY) or args.config
        script, recipe = find_script(name, args.train)
        path = str(find_config(name, recipe).resolve())
        settings = list(args.set)
        settings += [f"{key}={value}" for key, value in chosen.items() if key != CONFIG_KEY]
        run_name = name_run(chosen)
        try:
            config = load_config(path, settings, recipe)
            processes = max(args.processes, config["parallel"]["tensor"]["size"])
            build_plan(config, processes, None)  # it refuses a batch that does not divide
        except UserError as error:
            mistakes.append(error)
            failed[run_name] = ""
            print_wrapped(f"{run_name} cannot start: {error}", is_warning=True)
            continue
        values = frozenset(parse_name(run_name).items())
        folder = folders.setdefault(values, args.output.resolve() / run_name)
        twins = [other for other, content in configs.items() if content == (path, config)]
        if twins:
            print_wrapped(f"{run_name}: the same values as {twins[0].name}, trained once")
            continue
        if folder in planned:
            raise UserError(
                f"--grid: two combinations would share the folder {folder.name}: choose values "
                "that differ"
            )
        configs[folder] = path, config
        command = _start_processes(processes)
        command += [str(script), "--config", path]
        for setting in settings:
            command += ["--set", setting]
        planned[folder] = Planned([*command, "--output", str(folder)], processes)
    if not planned:
        raise mistakes[0]
    return planned


def _start_processes(number: int) -> list[str]:
    """Return the words that start a script in a number of processes."""
    command = [sys.executable]
    if number > 1:
        # Our own torchrun. It gets an address, since a host's name may not resolve.
        command += ["-m", "common.launch.signals", "--standalone", "--local_addr=127.0.0.1"]
        command.append(f"--nproc_per_node={number}")
    return command


def _find_folders(output: Path) -> dict[frozenset[Any], Path]:
    """Return the folders of the runs in ``output`` by their values."""
    folders = [path.parent for path in output.glob("*/config.json")]
    return {frozenset(parse_name(folder.name).items()): folder for folder in folders}


def name_run(values: Mapping[str, str]) -> str:
    """Return the name of a combination's folder, without characters that shells treat specially."""
    parts = [
        re.sub(r"[^\w.=+-]+", "_", f"{key}={value}").strip("_") for key, value in values.items()
    ]
    return ",".join(parts) or "run"


def parse_name(name: str) -> dict[str, int | float | str]:
    """Return the values in the name of a run's folder, ``KEY=VALUE,KEY=VALUE``."""
    pairs = [part.split("=", 1) for part in name.split(",") if "=" in part]
    return {key: parse_number(value) for key, value in pairs} or {"run": name}


def parse_number(text: str) -> int | float | str:
    """Return the number that ``text`` is, or ``text``."""
    for number_type in (int, float):
        with suppress(ValueError):
            return number_type(text)
    return text


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
