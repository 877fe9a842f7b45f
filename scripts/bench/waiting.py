"""Compare how OpenMP's threads wait at barriers: the quickstart's training, alone and beside a busy process.

python scripts/bench/waiting.py [--rounds 3] [--config quickstart] [--data DIR]

Wall time per step, over 60 steps after a warm-up of 20. Default data: the digits of scripts/quickstart.sh. To emulate a
CPU with only AVX2, set ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
MKL_ENABLE_INSTRUCTIONS=AVX2.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from start import TRAIN, recipe, recipe_options, run

from common.errors import run_command
from common.metrics.writers import read_metrics
from common.tools.benchmark import run_benchmark
from common.tools.harness import Row, interleave
from common.tools.result_rows import summarise

WAITING = {
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
    "ours": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
}
WARMUP, STEPS = 20, 60


def main(argv: list[str]) -> None:
    run_benchmark("waiting", measure, argv, __doc__, rounds=3, **recipe_options())


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each wait policy, alone and beside a process that keeps one core busy."""
    steps = 2 if args.tiny else STEPS
    for part, others in (("alone", 0), ("beside a busy process", 1)):
        with busy(others):
            variants = {name: partial(train, args, environ, steps) for name, environ in WAITING.items()}
            measured = interleave(variants, 1 if args.tiny else args.rounds)
            yield from summarise(measured, "libgomp's default", steps, part=part)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep as many cores busy within the context."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def train(args: argparse.Namespace, waiting: Mapping[str, str], steps: int) -> Row:
    """Train in a process with these environment variables; return the seconds of ``steps`` steps."""
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    words = recipe(args, f"MAX_STEPS={WARMUP + steps}", f"LOG.every={WARMUP}", "LOG.tensorboard=False")
    with TemporaryDirectory() as folder:
        run([str(TRAIN), "--output", f"{folder}/run", *words], environ | waiting)
        records = read_metrics(Path(folder) / "run")
        times = {record["step"]: record["time"] for record in records if record["kind"] == "train"}
        return {"wall": times[WARMUP + steps] - times[WARMUP]}


if __name__ == "__main__":
    run_command(main)
