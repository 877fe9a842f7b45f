"""Train one model in every parallel mode on the same data, and compare losses, memory, bytes sent and time.

DATA=/path/to/cifar10 python -m cifar10_benchmark.compare --steps 20 [--set KEY=VALUE ...] [--output DIR]

Writes DIR/compare.csv and DIR/compare.png, and prints the table. Each mode runs in as many processes as its config
splits the model over, from the same weights. Bytes are counted in the second step and listed beside the papers'
formulas for the matrix products; the step time is the median of the steps after it.

By default all steps are within the recipe's warm-up, where the losses agree to rounding. At the full learning rate
AdamW amplifies rounding within 50 steps. To compare past the warm-up, add --control, which trains the first config
again with a different number of threads: other modes should differ from it by no more than that.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cifar10_benchmark import dataloader
from cifar10_benchmark.formulas import expected_bytes
from common.colossal import BaseHook, Trainer
from common.config.load import load_config
from common.errors import UserError, counted, run_command
from common.estimate.traffic import NAMES, Traffic
from common.hardware import cores
from common.plot import build_figure, place_legend, save_figure
from common.run.comparison import MeasuredRun, build_parser, provenance, with_defaults
from common.table import format_table, write_csv

CONFIGS = ("vit_lite_vanilla", "vit_lite_1d", "vit_lite_2d", "vit_lite_2p5d", "vit_lite_3d")
SETTINGS = ("MODEL.dropout=0.0",)  # its masks differ between modes
CPU_SETTINGS = ("TOTAL_BATCH_SIZE=128",)  # 20 steps of five modes take minutes on two cores
COUNTED_STEP = 1  # the first includes setup


def main(argv: list[str]) -> None:
    parser = build_parser(__doc__, steps=20, output="outputs/compare")
    parser.add_argument("--configs", nargs="+", default=CONFIGS, help="default: the five vit_lite recipes")
    parser.add_argument("--control", action="store_true", help="train the first config again with different rounding")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # internal: output of one process of one mode
    args = parser.parse_args(argv)
    if args.steps <= COUNTED_STEP + 1:
        raise UserError(f"--steps {args.steps}: at least {COUNTED_STEP + 2} are needed; the first two are not timed")
    if args.measure:
        measure(args)
        return
    args.output.mkdir(parents=True, exist_ok=True)
    args.set = with_defaults(args.set, SETTINGS if torch.cuda.is_available() else (*SETTINGS, *CPU_SETTINGS))
    results = [run_mode(config, args) for config in args.configs]
    if args.control:
        results.insert(1, run_mode(args.configs[0], args, is_control=True))
    rows = [summarise(result, results[0]) for result in results]
    about = provenance("cifar10_benchmark.compare", argv)
    write_csv([row | about for row in rows], args.output / "compare.csv")
    draw(results, args.output / "compare.png")
    print(format_table(rows))
    print(f"{args.output}/compare.csv {args.output}/compare.png")


def run_mode(name: str, args: argparse.Namespace, *, is_control: bool = False) -> dict[str, Any]:
    """Train ``name`` in one process per model shard; return rank 0's measurements with the largest sizes.

    ``is_control`` halves the threads, or doubles one, for different rounding.
    """
    settings = [word for setting in args.set for word in ("--set", setting)]
    processes = load_config(name, args.set)["parallel"]["tensor"]["size"]
    if torch.cuda.is_available() and torch.cuda.device_count() < processes:
        raise UserError(f"{name} needs {processes} GPUs, not {torch.cuda.device_count()}: remove it from --configs")
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores() // processes))
    if is_control:
        threads = threads // 2 or 2
    with tempfile.TemporaryDirectory() as folder:
        words = ["--measure", folder, "--steps", str(args.steps), "--configs", name, *settings]
        if not start_ranks(processes, words, threads):
            raise UserError(f"{name} failed in {processes} processes: see their output above")
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    result = ranks[0] | {
        "config": f"{name}, {counted(threads, 'thread')}" if is_control else name,
        "processes": processes,
    }
    result["parameters"], result["memory"] = (max(rank[key] for rank in ranks) for key in ("parameters", "memory"))
    result["sent"] = {key: statistics.mean(rank["sent"].get(key, 0) for rank in ranks) for key in NAMES}
    return result


def start_ranks(processes: int, words: list[str], threads: int) -> bool:
    """Run this module with ``words`` in as many processes of ``threads`` each; return whether they succeeded."""
    torchrun = [sys.executable, "-m", "common.launch.torchrun", "--standalone", "--nproc_per_node", str(processes)]
    environ = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [*torchrun, "-m", "cifar10_benchmark.compare", *words]
    return subprocess.run(command, env=environ, check=False).returncode == 0


def summarise(result: dict[str, Any], vanilla: dict[str, Any]) -> dict[str, Any]:
    """Return a mode's row of the table; sizes in MB (10^6 bytes), per rank and per step."""
    pairs = zip(result["losses"], vanilla["losses"], strict=True)
    seconds = result["seconds"][COUNTED_STEP + 1 :]
    sent = sum(result["sent"].values())
    expected = expected_bytes(result["parallel"]["tensor"], result["batch"], result["model"])
    return {
        "config": result["config"],
        "processes": result["processes"],
        "batch": result["batch"],
        "steps": len(result["losses"]),
        "loss_difference": f"{max(abs(a - b) for a, b in pairs):.1e}",
        "last_loss": f"{result['losses'][-1]:.4f}",
        "parameters": result["parameters"],
        "peak_memory_mb": f"{result['memory'] / 1e6:.0f}",
        "sent_mb": f"{sent / 1e6:.2f}",
        "formula_mb": f"{expected / 1e6:.2f}",
        "step_s": f"{statistics.median(seconds):.3f}",
        **{f"{name}_mb": f"{result['sent'][name] / 1e6:.2f}" for name in NAMES},
    }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Plot the loss curves, and the nonzero differences of each mode's loss from the first.

    The curves are running means over a twentieth of the steps.
    """
    figure, (curves, differences) = build_figure(10, 4, columns=2)
    window = max(1, len(results[0]["losses"]) // 20)
    for number, result in enumerate(results):
        # the curves coincide: later ones are drawn thinner, so that all are visible
        line = dict(label=result["config"], color=f"C{number}", linewidth=1 + 1.2 * (len(results) - 1 - number))
        means = np.convolve(result["losses"], np.full(window, 1 / window), "valid")
        curves.plot(range(window - 1, len(result["losses"])), means, **line)
        if number:
            pairs = zip(result["losses"], results[0]["losses"], strict=True)
            line["linewidth"] = 1
            differences.semilogy([abs(a - b) or math.nan for a, b in pairs], ".-", **line)
    curves.set(xlabel="optimizer step", ylabel="training loss (cross-entropy)")
    differences.set(xlabel="optimizer step", ylabel=f"|loss - loss of {results[0]['config']}|")
    place_legend(curves, columns=2)
    save_figure(figure, path)


class Recorder(BaseHook):
    """Record loss and seconds of every step, and the traffic of one step."""

    def __init__(self) -> None:
        super().__init__(priority=0)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.traffic = Traffic()

    def before_train_iter(self, trainer: Trainer) -> None:
        if len(self.losses) == COUNTED_STEP:
            self.traffic.__enter__()
        self.started = time.perf_counter()

    def after_train_iter(self, trainer: Trainer, output: Tensor, label: Tensor, loss: Tensor) -> None:
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - self.started)
        if len(self.losses) == COUNTED_STEP + 1:
            self.traffic.__exit__(None, None, None)


def measure(args: argparse.Namespace) -> None:
    """Train like cifar10_benchmark/train.py, without evaluation, and write this rank's measurements."""
    (name,) = args.configs
    run = MeasuredRun(name, [*args.set, f"MAX_STEPS={args.steps}"], args.measure / "run", dataloader)
    recorder = Recorder()
    Trainer(run.engine).fit(run.loader, run.plan.epochs, run.plan.last_step, hooks=[recorder])
    result = {
        "losses": recorder.losses,
        "seconds": recorder.seconds,
        "sent": recorder.traffic.sent,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "memory": run.peak_memory(),
        "batch": run.plan.total_batch,
        "model": run.config["MODEL"],
        "parallel": run.config["parallel"],
    }
    (args.measure / f"{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run_command(main)
