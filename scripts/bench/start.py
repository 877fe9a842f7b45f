"""Measure the seconds from a command to its first optimizer step, and where they go.

python scripts/bench/start.py [--rounds 5] [--config quickstart] [--data DIR]

The command is `python imagenet_dali/train_dali.py --config quickstart --set MAX_STEPS=1`: `warm`, and as after an
installation, `without bytecode`. Its first step ends when metrics.jsonl says. The stages are those of a process that
runs the same code and notes the time between them. Digits as scripts/quickstart.sh writes them, unless --data says
otherwise.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import UserError, run_command
from common.metrics.writers import read_metrics
from common.tools.benchmark import run_benchmark
from common.tools.harness import ROOT, Figures, Row, interleave
from common.tools.result_rows import summarise

TRAIN, TRACED = ROOT / "imagenet_dali" / "train_dali.py", Path(__file__).with_name("start_traced.py")


def main(argv: list[str]) -> None:
    config = dict(default="quickstart", help="recipe (default: quickstart)")
    data = dict(default=str(ROOT / "data" / "digits"), help="prepared data set (default: data/digits)")
    run_benchmark("start", measure, argv, __doc__, rounds=5, config=config, data=data)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for the command, warm and without bytecode, and one for each stage."""
    settings = ["--config", args.config, "--set", f"DATA.root={args.data}", "--set", "MAX_STEPS=1"]
    variants: dict[str, Callable[[], Figures]] = {
        "warm": partial(first_step, settings, bytecode=True),
        "without bytecode": partial(first_step, settings, bytecode=False),
        "stages": partial(trace, settings),
    }
    figures = interleave(variants, 1 if args.tiny else args.rounds)
    stages = figures.pop("stages")
    yield from summarise(figures, "warm", part="to the first step")
    yield from summarise({stage: [one[stage] for one in stages] for stage in stages[0]}, "all", part="stages")


def first_step(settings: list[str], bytecode: bool) -> Figures:
    """Run the command; return the seconds from its start to the end of its first step."""
    with TemporaryDirectory() as folder:
        environ = os.environ | ({} if bytecode else {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode"})
        started = time.time()
        run([sys.executable, str(TRAIN), *settings, "--output", f"{folder}/run"], environ)
        record = next(record for record in read_metrics(Path(folder) / "run") if record["kind"] == "train")
        return {"wall": record["time"] - started}


def trace(settings: list[str]) -> dict[str, Figures]:
    """Run the command's code; return the seconds of each of its stages, and of all."""
    with TemporaryDirectory() as folder:
        started = time.time()
        printed = run([sys.executable, str(TRACED), *settings, "--output", f"{folder}/run"], os.environ)
    ends: dict[str, tuple[float, float]] = {"": (started, 0.0), **json.loads(printed.splitlines()[-1])}
    stages = {
        stage: {"wall": wall - before[0], "cpu": cpu - before[1]}
        for (_, before), (stage, (wall, cpu)) in pairwise(ends.items())
    }
    return stages | {"all": {clock: sum(stage[clock] for stage in stages.values()) for clock in ("wall", "cpu")}}


def run(command: list[str], environ: Mapping[str, str]) -> str:
    """Run the command; return what it prints."""
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


if __name__ == "__main__":
    run_command(main)
