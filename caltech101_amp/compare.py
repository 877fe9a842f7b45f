"""Train in full precision and in every mode of mixed precision, and compare memory and time.

DATA=/path/to/caltech101 python -m caltech101_amp.compare --steps 10 [--rounds 3] [--set KEY=VALUE ...] [--output DIR]

Writes DIR/compare.csv and DIR/compare.png, and prints the table. On a GPU: ViT-B/16 at batch 128, as in the configs.
On a CPU, unless overridden by --set: width 192, depth 4, 96 pixels, batch 32, which takes minutes; a CPU without
bfloat16 instructions runs only fp32, since all modes compute in float32 there. The modes are interleaved, --steps
steps per round. Values are medians over the rounds; those relative to fp32 are medians of the ratios within a round.
The last columns split the step time into waiting for data, forward pass with loss, backward pass and optimizer. Memory
is the increase of the process's peak since before the model was built.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from caltech101_amp.measure import PHASES, serve_rounds
from common.colossal import compute_dtype
from common.config.load import load_config
from common.errors import UserError, run_command
from common.plot import build_figure, place_legend, save_figure
from common.run.comparison import build_parser, provenance, with_defaults
from common.table import format_table, write_csv
from common.tools.harness import Row, in_processes, interleave

CONFIGS = {
    "fp32": "config_fp32",
    "AMP_TYPE.TORCH": "config_AMP_torch",
    "AMP_TYPE.NAIVE": "config_AMP_naive",
    "AMP_TYPE.APEX O1": "config_AMP_apex",
}
CPU_SETTINGS = ("MODEL.image_size=96", "MODEL.width=192", "MODEL.heads=3", "MODEL.depth=4", "MICRO_BATCH_SIZE=32")


def main(argv: list[str]) -> None:
    parser = build_parser(__doc__, steps=10, output="outputs/compare_amp")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per mode (default: 3)")
    args = parser.parse_args(argv)
    for name in ("steps", "rounds"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)}: at least 1")
    settings = args.set if torch.cuda.is_available() else with_defaults(args.set, CPU_SETTINGS)
    configs = {mode: config for mode, config in CONFIGS.items() if is_run(config, settings)}
    measurements = compare(settings, args.output, args.steps, args.rounds, configs)
    not_run = dict.fromkeys(summarise("fp32", measurements), "") | {"memory_gb": "not run: this CPU has no bfloat16"}
    rows = [summarise(mode, measurements) if mode in measurements else not_run | {"mode": mode} for mode in CONFIGS]
    args.output.mkdir(parents=True, exist_ok=True)
    chosen = " ".join(setting for setting in settings if not setting.startswith("DATA."))
    about = {"steps": args.steps, "rounds": args.rounds, "settings": chosen}
    about |= provenance("caltech101_amp.compare", argv)
    write_csv([row | about for row in rows], args.output / "compare.csv")
    draw(measurements, args.output / "compare.png")
    print(format_table(rows))
    print(f"{args.output}/compare.csv {args.output}/compare.png")


def is_run(config: str, settings: list[str]) -> bool:
    """Return whether this device computes in the config's precision; a CPU may use float32 instead."""
    fp16 = load_config(config, settings)["fp16"]
    here = compute_dtype(fp16, "cuda" if torch.cuda.is_available() else "cpu")
    return here != torch.float32 or compute_dtype(fp16, "cuda") == torch.float32


def compare(
    settings: list[str], output: Path, steps: int, rounds: int, configs: Mapping[str, str] = CONFIGS
) -> dict[str, list[Row]]:
    """Return each mode's measurements, one dict per round."""
    modes = {mode: partial(serve_rounds, config, settings, output / config, steps) for mode, config in configs.items()}
    with in_processes(modes) as variants:
        return interleave(variants, rounds)


def summarise(mode: str, measurements: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Return a mode's row of the table."""

    def median(key: str) -> float:
        return statistics.median(each[key] for each in measurements[mode])

    pairs = list(zip(measurements[mode], measurements["fp32"], strict=True))
    step = median("step")
    return {
        "mode": mode,
        "memory_gb": f"{median('memory') / 1e9:.2f}",
        "x_fp32_memory": f"{statistics.median(ours['memory'] / fp32['memory'] for ours, fp32 in pairs):.2f}",
        "iterations_per_s": f"{1 / step:.2f}",
        "samples_per_s": f"{measurements[mode][0]['batch'] / step:.1f}",
        "x_fp32_speed": f"{statistics.median(fp32['step'] / ours['step'] for ours, fp32 in pairs):.2f}",
        **{phase: f"{median(phase) / step:.1%}" for phase in PHASES},
    }


def draw(measurements: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Plot bars of memory, samples per second, and the phases of a step."""
    figure, (memory, speed, phases) = build_figure(13, 4, columns=3)
    for number, (mode, rounds) in enumerate(measurements.items()):
        label = mode.removeprefix("AMP_TYPE.")
        medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        bars = [memory.bar(label, medians["memory"] / 1e9, color=f"C{number}")]
        bars.append(speed.bar(label, medians["batch"] / medians["step"], color=f"C{number}"))
        for axes, bar in zip((memory, speed), bars, strict=True):
            axes.bar_label(bar, fmt="%.3g")
        bottom = 0.0
        for shade, phase in enumerate(PHASES):
            style = dict(color=f"{0.8 - 0.2 * shade:.1f}", label=None if number else phase)
            phases.bar(label, medians[phase] * 1e3, bottom=bottom * 1e3, **style)
            bottom += medians[phase]
    memory.set_ylabel("peak memory (GB)")
    speed.set_ylabel("throughput (images/s)")
    phases.set_ylabel("time of a step (ms)")
    place_legend(phases)
    save_figure(figure, path)


if __name__ == "__main__":
    run_command(main)
