"""Draw the pictures of docs/batch-study.md and docs/recipes.md, and print the study's tables.

python cifar10_benchmark/pictures.py

It reads results.csv and metrics*.jsonl, beside this file. The runs of the noise scale are not
kept there: a command in docs/batch-study.md trains them into outputs/noise.
"""

import argparse
import csv
import json
import re
import shlex
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from matplotlib import pyplot

HERE = Path(__file__).parent
OPTIMIZERS = {
    "Muon": dict(name="muon", adamw_lr_scale="0.1", momentum="0.8", betas="(0.9,0.95)"),
    "AdamW": dict(name="adamw"),
    "LAMB": dict(name="lamb"),
    "LAMB with bias correction": dict(name="lamb", bias_correction="True"),
}
BATCHES = ("256", "1024", "4096", "8192")
SETTINGS = {"MODEL.width": "128", "clip_grad_norm": "1.0", "WARMUP_EPOCHS": "2"}
GROWING = {
    "[(3,256),(2,512),(2,1024),(2,2048)]": ("^", "by hand"),
    "noise": ("o", "by noise"),
    "noise 1.7": ("s", "by noise, NOISE_FACTOR=1.7"),
}
NOISE_RUNS = ("adamw-256", "adamw-1024", "lamb-256", "lamb-1024", "muon-256", "muon-1024")
NOISE_NAMES = {"adamw": "AdamW", "lamb": "LAMB", "muon": "Muon"}
CURVES = {
    "56 epochs at 16, 24 and 32 pixels": "metrics_growing.jsonl",
    "120 epochs at 16, 24 and 32 pixels": "metrics_growing_120.jsonl",
    "60 epochs at 32 pixels": "metrics.jsonl",
}


@dataclass
class Run:
    """A run of the study: ``top1`` in per cent, of the last epoch."""

    steps: int
    top1: float


Study = dict[tuple[str, str], dict[str, dict[str, Run]]]


def optimizer_of(settings: dict[str, str]) -> dict[str, str]:
    """Return the options of OPTIMIZER, which are set one by one or as a dict."""
    options = dict(re.findall(r"(\w+)=[\"']?(\([^)]*\)|[\w.]+)", settings.get("OPTIMIZER", "")))
    for key, value in settings.items():
        if key.startswith("OPTIMIZER."):
            options[key.removeprefix("OPTIMIZER.")] = value
    return options


def read_study() -> Study:
    """Return the study's runs by optimizer and batches, then learning rate, then seed."""
    study: Study = defaultdict(lambda: defaultdict(dict))
    for row in csv.DictReader((HERE / "results.csv").read_text().splitlines()):
        words = pairwise(shlex.split(row["command"]))
        settings = dict(value.split("=", 1) for flag, value in words if flag == "--set")
        if row["epochs"] != "10" or not SETTINGS.items() <= settings.items():
            continue
        names = [name for name, own in OPTIMIZERS.items() if own == optimizer_of(settings)]
        if not names:
            continue
        batches = settings.get("BATCH_SIZES", row["global_batch"])
        batches = f"{batches} {settings.get('NOISE_FACTOR', '')}".strip()
        of_rate = study[names[0], batches][settings["LEARNING_RATE"]]
        run = Run(int(row["steps"]), 100 * float(row["top1"]))
        # A seed's later rows are variations, or runs that measure the noise scale.
        of_rate.setdefault(settings.get("SEED", "42"), run)
    return study


def best_rate(study: Study, optimizer: str, batches: str) -> tuple[str, list[Run]]:
    """Return the best of the learning rates that have the most seeds, and its runs."""
    rates = [(rate, [*runs.values()]) for rate, runs in study[optimizer, batches].items()]
    return max(rates, key=lambda item: (len(item[1]), mean_top1(item[1])))


def mean_top1(runs: list[Run]) -> float:
    return mean(run.top1 for run in runs)


def describe(runs: list[Run]) -> str:
    """Return mean and range of top-1; and n, where it is not three."""
    tops = [run.top1 + 1e-6 for run in runs]  # rounds a half up: 53.25 to 53.3
    count = "" if len(runs) == 3 else f", n={len(runs)}"
    return f"{mean(tops):.1f} % ({min(tops):.1f} to {max(tops):.1f}{count})"


def print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |")


def print_batches(study: Study) -> None:
    """Print what a large batch costs: the best rate and top-1 of each optimizer."""
    print_row("batch", "steps", *OPTIMIZERS)
    for batch in BATCHES:
        best = [best_rate(study, optimizer, batch) for optimizer in OPTIMIZERS]
        steps = best[0][1][0].steps
        cells = [f"{rate}: {describe(runs)}" for rate, runs in best]
        print_row(f"{int(batch):,}", f"{steps:,}", *cells)


def draw_growing(study: Study, output: Path) -> None:
    """Print and draw top-1 against steps: fixed batches beside those that grow."""
    print_row("", "fixed 256", *(label for _, label in GROWING.values()))
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 4.3), layout="constrained")
    for axes, name in zip(panels, ("Muon", "AdamW", "LAMB"), strict=True):
        cells = []
        for batches in ("256", *GROWING):
            _, runs = best_rate(study, name, batches)
            cells.append(f"{mean(run.steps for run in runs):,.0f}: {describe(runs)}")
        print_row(name, *cells)

        fixed = [best_rate(study, name, batch)[1] for batch in ("1024", "256")]
        for runs in fixed:
            draw_runs(axes, runs, ".", color="grey", alpha=0.6)
        line = [runs[0].steps for runs in fixed], [mean_top1(runs) for runs in fixed]
        label = "fixed 1,024 and 256, best rate: runs, means"
        axes.plot(*line, color="grey", label=label)
        for colour, (batches, (marker, label)) in enumerate(GROWING.items()):
            rates = study[name, batches].values()
            runs = [run for of_rate in rates for run in of_rate.values()]
            draw_runs(axes, runs, marker, color=f"C{colour}", alpha=0.7, label=label)
        axes.set(title=name, xlabel="optimizer steps of ten epochs")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("top-1 (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.savefig(output / "growing.png", dpi=100)


def draw_runs(axes: Any, runs: list[Run], marker: str, **style: Any) -> None:
    axes.plot([run.steps for run in runs], [run.top1 for run in runs], marker, **style)


def read_metrics(path: Path, kind: str) -> list[dict[str, Any]]:
    rows = map(json.loads, path.read_text().splitlines())
    return [row for row in rows if row["kind"] in kind.split()]


def two_points_batch(study: Study, optimizer: str) -> float:
    """Return the batch that costs two points of batch 256's top-1.

    It is interpolated between the printed means, linearly in the batch's logarithm.
    """
    means = [round(mean_top1(best_rate(study, optimizer, batch)[1]) + 1e-6, 1) for batch in BATCHES]
    wanted = means[0] - 2
    next_below = next(number for number, top1 in enumerate(means) if top1 < wanted)
    above, below = means[next_below - 1 : next_below + 1]
    small, large = map(int, BATCHES[next_below - 1 : next_below + 1])
    return small * (large / small) ** ((above - wanted) / (above - below))


def print_noise(study: Study, folder: Path, key: str) -> None:
    """Print the noise scale of the runs after some epochs, and beside the study."""
    is_optimizers = key == "optimizer_noise_scale"
    medians = ["last third's median", "the run's"][: 1 + is_optimizers]
    print_row(key, "after 1 epoch", "2", "5", "10", *medians, "two points", "ratio")
    for run in NOISE_RUNS:
        rows = read_metrics(folder / run / "metrics.jsonl", "train")
        scales = [(row["epoch"], row[key]) for row in rows if row.get(key)]
        if not scales:
            continue
        figures = [[scale for epoch, scale in scales if epoch <= end][-1] for end in (1, 2, 5, 10)]
        figures.append(median(scale for epoch, scale in scales if epoch > 10 * 2 / 3))
        if is_optimizers:
            figures.append(median(scale for _, scale in scales))
        name, _, batch = run.partition("-")
        optimizer = NOISE_NAMES[name]
        batch_of_study = two_points_batch(study, optimizer)
        ratio = figures[-1] / batch_of_study
        cells = [f"{figure:,.0f}" for figure in (*figures, batch_of_study)]
        print_row(f"{optimizer}, {int(batch):,}", *cells, f"{ratio:.1f}")


def draw_noise(folder: Path, output: Path) -> None:
    """Draw the noise scale over the epochs."""
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for number, run in enumerate(NOISE_RUNS):
        rows = read_metrics(folder / run / "metrics.jsonl", "train")
        curve = {row["epoch"]: row["noise_scale"] for row in rows if row["noise_scale"]}
        style = "-" if run.endswith("-256") else "--"
        axes.plot([*curve], [*curve.values()], style, color=f"C{number // 2}", label=run)
    ticks = [100, 300, 1000, 3000, 10_000]
    axes.set(yscale="log", xlabel="epoch", ylabel="noise scale, images")
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.legend()
    figure.savefig(output / "noise_scale.png", dpi=100)


def draw_top1_by_time(output: Path) -> None:
    """Draw top-1 of three runs on two CPU cores against minutes."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for label, name in CURVES.items():
        seconds, minutes, top1 = 0.0, [], []
        for before, row in pairwise(read_metrics(HERE / name, "train eval")):
            passed = row["time"] - before["time"]
            seconds += passed if passed < 120 else 0  # longer: the run was stopped, and resumed
            if row["kind"] == "eval":
                minutes.append(seconds / 60)
                top1.append(100 * row["top1"])
        axes.plot(minutes, top1, "o-", label=label)
    axes.set(xlabel="minutes", ylabel="top-1 on the 10,000 test images, %", ylim=(45, 95))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(output / "top1_by_time.png", dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the pictures")
    parser.add_argument("--noise", type=Path, default="outputs/noise", help="runs, by name")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    study = read_study()
    draw_top1_by_time(args.output)
    print_batches(study)
    print()
    draw_growing(study, args.output)
    missing = [run for run in NOISE_RUNS if not (args.noise / run / "metrics.jsonl").exists()]
    if missing:
        print(f"\n{args.noise} lacks {', '.join(missing)}: noise_scale.png is not drawn")
        return
    draw_noise(args.noise, args.output)
    for key in ("noise_scale", "optimizer_noise_scale"):
        print()
        print_noise(study, args.noise, key)


if __name__ == "__main__":
    main()
