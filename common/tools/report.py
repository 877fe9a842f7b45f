"""Write one self-contained HTML page about a run, several runs, or a sweep.

python scripts/report.py outputs/vit-b16
python scripts/report.py outputs/vit_lite_vanilla --csv >> cifar10_benchmark/results.csv

The page has a curve of every metric in metrics.jsonl, a summary, the environment, and the config:
the whole of a single run's, and what differs between those of several. --csv prints a row for each
run instead, as in results.csv. Which combination of a sweep is best: scripts/sweep.py --output DIR.
"""

import base64
import csv
import io
import itertools
import math
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from jinja2 import Environment

from common.checkpoint.content import METRICS, ConfigFile, list_changes, read_metadata
from common.checkpoint.save import find_best
from common.config.fields import flatten
from common.errors import UserError, command_parser
from common.files import Values, fingerprint_of, plain_cell, replacing, short_path
from common.metrics.curves import name_loss
from common.metrics.evaluation import Best, metric_value, rank_evaluation
from common.metrics.metrics_file import CHARTS, NON_FINITE, UNPLOTTED, Chart, Metrics, read_metrics
from common.metrics.plot import build_figure
from common.process import ends_cleanly
from common.text import counted, list_some, printable

ABSENT = "-"
LONG_LIST = 20  # most items of a list that is shown whole
# Of config.json; shown elsewhere.
NO_ENVIRONMENT = {"name", "config", "plan", "argv", "started", "starts"}


# What a curve is drawn over, by the argument --x, and its title.
AXES = {"step": "optimizer step", "epoch": "epoch", "images": "training images", "time": "hours"}


@dataclass(frozen=True)
class RecordedRun:
    """What a finished or running run has written; ``metadata`` is config.json."""

    name: str
    metadata: Values
    metrics: Sequence[Metrics]
    marked: Metrics | None = None  # the evaluation of checkpoints/best, where there is one

    @property
    def steps(self) -> str:
        """The optimizer steps up to the last record, and of how many if the run has not ended."""
        done = max((line["step"] for line in self.metrics), default=0)
        planned = self.metadata.get("plan", {}).get("last_step", done)
        return f"{done:,}" if done == planned else f"{done:,} of {planned:,}"

    @property
    def seconds(self) -> float:
        """The wall time up to the last record, without the pauses before a start."""
        return self.elapsed[-1] if self.metrics else 0.0

    @property
    def elapsed(self) -> list[float]:
        """The wall time up to each record, in seconds, without the pauses before a start."""
        starts = [
            start["started"] for start in self.metadata.get("starts", ()) if "started" in start
        ]
        total = 0.0
        before = math.inf  # no start, no time
        elapsed = []
        for line in self.metrics:
            now = line.get("time", -math.inf)
            # A start that wrote no record counts no time.
            while starts and starts[0] <= now:
                before = starts.pop(0)
            total += max(0.0, now - before)
            before = max(before, now)
            elapsed.append(total)
        return elapsed

    def positions(self, axis: str) -> list[float | None]:
        """Return where each record is on an axis of `AXES`, None where the run does not tell."""
        if axis == "time":
            return [seconds / 3600 for seconds in self.elapsed]
        if axis == "images":
            if self.has_batches:
                images = self.metadata.get("data", {}).get("train_samples")
                return [images and images * line["epoch"] for line in self.metrics]
            batch = self.metadata.get("plan", {}).get("total_batch")
            return [batch and batch * line["step"] for line in self.metrics]
        return [line.get(axis) for line in self.metrics]

    def values(self, name: str, kind: str, axis: str) -> list[tuple[float, float]]:
        """Return the positions on an axis, and the values, of a metric where it has one."""
        return [
            (position, record[name])
            for position, record in zip(self.positions(axis), self.metrics, strict=True)
            if position is not None and record["kind"] == kind and record.get(name) is not None
        ]

    @property
    def has_batches(self) -> bool:
        """Whether its steps have several batches."""
        return bool(self.metadata["config"].get("BATCH_SIZES"))

    @property
    def final(self) -> Metrics | None:
        """The evaluation after the last planned step, if the run has come so far."""
        last_step = self.metadata.get("plan", {}).get("last_step", math.inf)
        return next((line for line in self.of_kind("eval") if line["step"] >= last_step), None)

    @property
    def metric(self) -> str:
        """The metric of the best evaluation, the config's BEST."""
        return self.metadata["config"].get("BEST", "top1")

    @property
    def best(self) -> Metrics:
        """The evaluation of checkpoints/best, or if that is gone, the best; {} before any."""
        # the mark first: with another BEST, other data or in a branch, the best starts anew
        return self.marked or max(
            self.of_kind("eval"), key=lambda line: rank_evaluation(line, self.metric), default={}
        )

    def of_kind(self, kind: str) -> list[Metrics]:
        return [line for line in self.metrics if line["kind"] == kind]

    def median(self, name: str, form: str) -> str:
        """Return the median of a training metric, scaled as in `CHARTS`, by the format ``form``."""
        # Not the mean: the first record has the time of compilation in it.
        values = [line[name] for line in self.of_kind("train") if line.get(name) is not None]
        return form.format(CHARTS[name].scale * statistics.median(values)) if values else ABSENT


@ends_cleanly
def main(argv: list[str]) -> None:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run or a sweep")
    add(
        "--output", type=Path, metavar="FILE", help="default: report.html in the folder of all runs"
    )
    add(
        "--csv",
        action="store_true",
        help="print a row of results.csv for each run, and write no page",
    )
    add(
        "--x",
        choices=AXES,
        help="what curves are drawn over (default: step, or epoch for runs of different batches)",
    )
    args = parser.parse_args(argv)
    # a sweep's folder stands for its runs
    folders = [folder for named in args.runs for folder in find_runs(named)]
    if not folders:
        raise UserError(f"{args.runs[0]} holds no run: name the folder of a run or of a sweep")
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):  # of several sweeps
        names = map(str, folders)
    runs = load_readable(folders, names)
    if args.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        for run in runs:
            writer.writerow(map(plain_cell, result_row(run).values()))
        return
    # Of one run, its own folder.
    common_folder = os.path.commonpath([named.resolve() for named in args.runs])
    output = args.output or Path(common_folder, "report.html")
    page = render(runs, args.x)
    with replacing(output) as partial:
        partial.write_text(page, encoding="utf-8")
    print(f"{short_path(output)}  ({counted(len(runs), 'run')})")


def find_runs(folder: Path) -> list[Path]:
    """Return ``folder``, or the runs in it if it is a sweep's; skip what is neither."""
    if (folder / "config.json").exists():
        return [folder]
    inside = sorted(path.parent for path in folder.glob("*/config.json"))
    if not inside:
        print(f"skipped {short_path(folder)}: no run", file=sys.stderr)
    return inside


def load_readable(folders: Iterable[Path], names: Iterable[str]) -> list[RecordedRun]:
    """Return the runs that can be read; say which are skipped, and why.

    Raises `UserError` if there is none.
    """
    runs = []
    faults = []
    for folder, name in zip(folders, names, strict=True):
        try:
            runs.append(load_run(folder, name))
        except UserError as error:
            faults.append(error)
    if faults and not runs:
        raise faults[0]
    for fault in faults:
        print(printable(f"skipped {fault}"), file=sys.stderr)
    return runs


def load_run(folder: Path, name: str) -> RecordedRun:
    """Read a run's config.json and metrics.jsonl; the run may still be running."""
    metadata = read_metadata(folder, ConfigFile)
    metrics = read_metrics(folder) if (folder / METRICS).exists() else []  # before the first step
    marked = find_best(folder, [line for line in metrics if line["kind"] == "eval"])
    return RecordedRun(name, metadata, metrics, marked)


def result_row(run: RecordedRun) -> dict[str, Any]:
    """Return a run's row of results.csv; losses are those of the first and last train record."""
    metadata = run.metadata
    train = run.of_kind("train")
    evaluations = run.of_kind("eval")
    if not train or not evaluations:
        raise UserError(
            f"{run.name} has no evaluation yet, so no result: train it for longer, or lower "
            "EVAL_EVERY"
        )
    # Not the best one, which is chosen on the images it is measured on.
    last = evaluations[-1]
    # Only with LOG.noise_scale.
    noise_scale = train[-1].get("noise_scale")
    columns = result_columns(metadata)
    return {
        "date": columns.pop("date"),
        "config": metadata["name"],
        "hardware": columns.pop("hardware"),
        "processes": metadata["plan"]["gpus"],
        "global_batch": metadata["plan"]["total_batch"],
        "epochs": f"{last['epoch']:g}",
        "steps": last["step"],
        "first_loss": f"{train[0]['loss']:.4f}",
        "last_loss": f"{train[-1]['loss']:.4f}",
        "noise_scale": "" if noise_scale is None else f"{noise_scale:.0f}",
        "top1": f"{last['top1']:.4f}",
        "top5": f"{last['top5']:.4f}",
        "eval_images": last["samples"],
        "minutes": f"{run.seconds / 60:.1f}",
    } | columns


def result_columns(metadata: Values) -> dict[str, str | None]:
    """Return the columns of a table of results that say where `describe_run`'s result is from."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime(metadata["started"])),
        "hardware": name_hardware(metadata["hardware"]),
        "versions": " ".join(
            f"{name}={number}" for name, number in metadata["versions"].items() if number
        ),
        "commit": metadata["commit"],
        # absolute paths are reduced to their last part
        "command": shlex.join(re.sub(r"(^|=)/.*/(?=.)", r"\1", word) for word in metadata["argv"]),
    }


def name_hardware(hardware: Values) -> str:
    """Return the GPU's name, or for CPUs a text like "2 cores of AMD EPYC, AVX2"."""
    if hardware["gpu"]:
        return hardware["gpu"]
    instructions = hardware.get("instruction_set", ABSENT)  # as clouds hide the exact model
    return f"{counted(hardware['cpus'], 'core')} of {hardware['cpu']}, {instructions}"


def render(runs: Sequence[RecordedRun], axis: str | None = None) -> str:
    """Return the page; ``axis``, of `AXES`, is chosen if it is None."""
    configs = _align([run.metadata["config"] for run in runs])
    if len(runs) > 1:  # what they share would hide what differs
        configs = {key: cells for key, cells in configs.items() if len(set(cells)) > 1}
    environment = {
        key: cells
        for key, cells in _align([run.metadata for run in runs]).items()
        if key.partition(".")[0] not in NO_ENVIRONMENT
    }
    source = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return (
        # Names and commands of a run are text, not HTML.
        Environment(autoescape=True)
        .from_string(source)
        .render(
            runs=runs,
            title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
            summary={title: [*map(cell, runs)] for title, cell in SUMMARY.items()},
            keys=configs,
            environment=environment,
            commands={
                run.name: shlex.join(["python", *run.metadata.get("argv", ())]) for run in runs
            },
            charts=collect_charts(runs, axis or choose_axis(runs)),
            colors=color_runs(len(runs)),
        )
    )


def _describe_best(run: RecordedRun) -> str:
    """Return the metric of BEST and top-1 of the best evaluation."""
    metric = run.metric
    best = run.best
    if rank_evaluation(best, metric) == Best():
        return ABSENT
    step = f"at step {best['step']:,}"
    top1 = f"top-1 {best['top1']:.2%}"
    if metric == "top1":
        return f"{top1} {step}"
    return f"{metric} {metric_value(best, metric):.4f} {step}, {top1}"


def _describe_bad_steps(lines: Sequence[Metrics]) -> str:
    if not lines:
        return ABSENT
    first = lines[0]
    images = list_some(first.get("images", []), most=2)
    return f"{len(lines):,}, the first {first['step']:,}: {images}; see --replay {first['step']}"


SUMMARY: dict[str, Callable[[RecordedRun], str]] = {
    "Top-1, last evaluation": lambda run: [
        ABSENT,
        *(f"{line['top1']:.2%}" for line in run.of_kind("eval")),
    ][-1],
    "Best evaluation, by BEST": _describe_best,
    "Steps": lambda run: run.steps,
    "Steps not finite": lambda run: _describe_bad_steps(run.of_kind(NON_FINITE)),
    "Wall time": lambda run: str(timedelta(seconds=round(run.seconds))),
    "Images per second, median": lambda run: run.median("samples_per_s", "{:,.0f}"),
    "Hardware": lambda run: (
        name_hardware(run.metadata["hardware"]) if "hardware" in run.metadata else ABSENT
    ),
    "Processes": lambda run: str(run.metadata.get("plan", {}).get("gpus", 1)),
    "Changed since the first start": lambda run: "; ".join(list_changes(run.metadata)) or ABSENT,
}


def _align(columns: Sequence[Values]) -> dict[str, list[str]]:
    """Return the cells of a table with a column for each nested dict, by ``outer.inner`` key.

    Of a long list, such as the names of 1,000 classes, a cell has the first and a fingerprint.
    """
    flat = [flatten(column) for column in columns]
    table = {}
    for key in itertools.chain.from_iterable(flat):
        table[key] = [_show(column.get(key, ABSENT)) for column in flat]
    return table


def _show(value: Any) -> str:
    if isinstance(value, Sequence) and len(value) > LONG_LIST and not isinstance(value, str):
        return f"{list_some([*map(str, value)])} (fingerprint {fingerprint_of(value)[:8]})"
    return str(value)


def choose_axis(runs: Sequence[RecordedRun]) -> str:
    """Return "epoch" for runs of different batches, which steps do not compare; else "step"."""
    batches = {run.metadata.get("plan", {}).get("total_batch") for run in runs}
    is_one = len(batches) == 1 and not any(run.has_batches for run in runs)
    return "step" if is_one else "epoch"


def collect_charts(runs: Sequence[RecordedRun], axis: str) -> list[dict[str, str]]:
    """Return the title and the picture over ``axis`` of every metric that the runs have."""
    losses = " or ".join(dict.fromkeys(name_loss(run.metadata["config"]) for run in runs))
    names = dict.fromkeys(CHARTS)
    for run in runs:
        for record in run.metrics:
            names |= dict.fromkeys(record)
    charts = []
    for name in names:
        if name in UNPLOTTED:
            continue
        # A metric that nobody named: one of a user's hook.
        chart = CHARTS.get(name, Chart(name))
        figure, axes = build_figure(4.8, 2.6)
        kinds = _plot(axes, runs, name, chart.scale, axis)
        axes.set_xlabel(AXES[axis], color="0.5")
        axes.locator_params("x", nbins=5)  # "100000" and its like would touch
        if not kinds:
            continue
        # It spans powers of ten, and is read against the batch.
        if name.endswith("noise_scale"):
            axes.set_yscale("log")
            for color, run in zip(color_runs(len(runs)), runs, strict=True):
                batch = run.metadata.get("plan", {}).get("total_batch")
                if run.has_batches:
                    sizes = run.values("batch_size", "train", axis)
                    axes.plot(*zip(*sizes, strict=True), "--", color=color, linewidth=0.8)
                elif batch:
                    axes.axhline(batch, color=color, linestyle="--", linewidth=0.8)
        title = chart.title
        if name == "loss":  # which may differ, so that they cannot be compared
            title += f" (training: {losses}; evaluation: cross-entropy)"
        if len(kinds) > 1:
            title += " (line: training, dashes with dots: evaluation)"
        charts.append({"title": title, "picture": _encode(figure)})
    return charts


def color_runs(count: int) -> list[str]:
    """Return a colour for each of ``count`` runs, as HTML names it."""
    from matplotlib import colormaps, colors  # takes half a second to import

    # tab10 has ten colours that differ well; turbo has any number.
    palette = colormaps["tab10"] if count <= 10 else colormaps["turbo"].resampled(count)
    return [colors.to_hex(palette(number)) for number in range(count)]


def _plot(axes: Any, runs: Sequence[RecordedRun], name: str, scale: float, axis: str) -> set[str]:
    """Plot a metric of all runs; return the kinds of records that have a value of it."""
    kinds = set()
    for color, run in zip(color_runs(len(runs)), runs, strict=True):
        for kind in ("train", "eval"):
            measured = [
                (position, scale * value) for position, value in run.values(name, kind, axis)
            ]
            if not measured:
                continue
            kinds.add(kind)
            # a line of one record would not be seen without a dot
            is_plain = kind == "train" and len(measured) > 1
            style = "-" if is_plain else ".--"
            axes.plot(*zip(*measured, strict=True), style, color=color, linewidth=1.2)
    return kinds


def _encode(figure: Any) -> str:
    """Return the picture as the address of an image, so that the page holds it."""
    from matplotlib import rc_context

    (axes,) = figure.axes
    # grey is seen on light and on dark pages
    axes.spines[:].set_color("0.5")
    axes.tick_params(colors="0.5")
    svg = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # text stays text, which is smaller than outlines
        figure.savefig(svg, format="svg", transparent=True)
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.getvalue()).decode()}"
