"""Measure the time from a command to the end of its first optimizer step.

python scripts/bench/start.py [--rounds 5] [--config quickstart] [--data DIR]

The command is `python imagenet_dali/train_dali.py --config quickstart --set MAX_STEPS=1`, `warm` and `without
bytecode`, as after an installation; metrics.jsonl records the end of the step. Default data: the digits of
scripts/quickstart.sh.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import UserError, run_command
from common.metrics.writers import read_metrics
from common.tools.benchmark import run_benchmark
from common.tools.harness import ROOT, Row, interleave
from common.tools.result_rows import summarise

TRAIN = ROOT / "imagenet_dali" / "train_dali.py"


def main(argv: list[str]) -> None:
    run_benchmark("start", measure, argv, __doc__, rounds=5, **recipe_options())


def recipe_options() -> dict[str, dict[str, str]]:
    """Return the command-line options of the recipe and its data."""
    return {
        "config": dict(default="quickstart", help="recipe (default: quickstart)"),
        "data": dict(default=str(ROOT / "data" / "digits"), help="prepared data set (default: data/digits)"),
    }


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row with warm bytecode and one without."""
    words = recipe(args, "MAX_STEPS=1")
    variants = {
        "warm": partial(first_step, words, bytecode=True),
        "without bytecode": partial(first_step, words, bytecode=False),
    }
    yield from summarise(interleave(variants, 1 if args.tiny else args.rounds), "warm", part="to the first step")


def recipe(args: argparse.Namespace, *settings: str) -> list[str]:
    """Return the training's arguments."""
    return ["--config", args.config, *(w for s in (f"DATA.root={args.data}", *settings) for w in ("--set", s))]


def first_step(words: Sequence[str], bytecode: bool) -> Row:
    """Return the seconds from the command's start to the end of its first step."""
    with TemporaryDirectory() as folder:
        environ = os.environ | ({} if bytecode else {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode"})
        started = time.time()
        run([str(TRAIN), *words, "--output", f"{folder}/run"], environ)
        record = next(record for record in read_metrics(Path(folder) / "run") if record["kind"] == "train")
        return {"wall": record["time"] - started}


def run(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run this Python with ``words``; return its output."""
    done = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{' '.join(words)} failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


if __name__ == "__main__":
    run_command(main)
