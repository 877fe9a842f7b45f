"""Measure a training command: the time to its first step, and steps by how OpenMP's threads wait at barriers.

python scripts/bench/quickstart.py [--rounds 3] [--config NAME] [--data DIR]

The command is `python imagenet_dali/train_dali.py --config quickstart`; metrics.jsonl records the times. The first step
is measured `warm` and `without bytecode`, as after an installation; the others, 60 after a warm-up of 20, alone and
beside a busy process. Default data: the digits of scripts/quickstart.sh. To emulate a CPU with only AVX2, set
ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import UserError, run_command
from common.metrics.writers import read_metrics
from common.tools.benchmark import run_benchmark
from common.tools.harness import ROOT, Row, interleave
from common.tools.result_rows import summarise

TRAIN = ROOT / "imagenet_dali" / "train_dali.py"
WAITING = {
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
    "ours": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
}
WARMUP, STEPS = 20, 60


def main(argv: list[str]) -> None:
    config = dict(default="quickstart", help="recipe (default: quickstart)")
    data = dict(default=str(ROOT / "data" / "digits"), help="prepared data set (default: data/digits)")
    run_benchmark("quickstart", measure, argv, __doc__, rounds=3, config=config, data=data)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row with bytecode and one without, then one for each wait policy, alone and beside a busy process."""
    rounds, steps = (1, 2) if args.tiny else (args.rounds, STEPS)
    starts = {"warm": True, "without bytecode": False}
    variants = {name: partial(time_start, args, has_bytecode) for name, has_bytecode in starts.items()}
    yield from summarise(interleave(variants, rounds), "warm", part="to the first step")
    for part, others in (("alone", 0), ("beside a busy process", 1)):
        with busy(others):
            variants = {name: partial(time_steps, args, environ, steps) for name, environ in WAITING.items()}
            yield from summarise(interleave(variants, rounds), "libgomp's default", steps, part=part)


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


def time_start(args: argparse.Namespace, has_bytecode: bool) -> Row:
    """Return the seconds from the command's start to the end of its first step."""
    with TemporaryDirectory() as folder:
        started = time.time()
        times = train(args, {} if has_bytecode else {"PYTHONPYCACHEPREFIX": folder}, "MAX_STEPS=1")
        return {"wall": times[1] - started}


def time_steps(args: argparse.Namespace, waiting: Mapping[str, str], steps: int) -> Row:
    """Return the seconds of ``steps`` steps with these environment variables."""
    times = train(args, waiting, f"MAX_STEPS={WARMUP + steps}", f"LOG.every={WARMUP}", "LOG.tensorboard=False")
    return {"wall": times[WARMUP + steps] - times[WARMUP]}


def train(args: argparse.Namespace, environ: Mapping[str, str], *settings: str) -> dict[int, float]:
    """Train in a process with these environment variables; return the time of each record, by its step."""
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    words = [word for setting in (f"DATA.root={args.data}", *settings) for word in ("--set", setting)]
    with TemporaryDirectory() as folder:
        command = [sys.executable, str(TRAIN), "--config", args.config, "--output", f"{folder}/run", *words]
        done = subprocess.run(command, env=kept | environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1]}")
        records = read_metrics(Path(folder) / "run")
    return {record["step"]: record["time"] for record in records if record["kind"] == "train"}


if __name__ == "__main__":
    run_command(main)
