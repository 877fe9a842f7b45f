"""Write one self-contained HTML page about a run or several: ``python scripts/report.py RUN [RUN...]``.

It holds the curves of every metric in metrics.jsonl, a summary, the environment, and the config: the whole of a single
run's, and what differs between those of several.
"""

import itertools
import json
import math
import os
import re
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from common.checkpoint.content import METRICS, RunInfo, read_about
from common.errors import UserError, command_parser, counted
from common.files import own_file, short_path
from common.metrics.curves import Metrics, read_metrics
from common.metrics.provenance import name_hardware
from common.table import flatten
from common.tools.report_curves import collect_charts

ABSENT = "-"
MANY = 7  # colours of the palette; more runs are the rows of the tables, not their columns


@dataclass(frozen=True)
class FinishedRun:
    """What a run left, or has left so far: ``about`` is config.json, ``saved_step`` that of its newest checkpoint."""

    name: str
    about: Mapping[str, Any]
    records: Sequence[Metrics]
    saved_step: int = 0

    @property
    def steps(self) -> str:
        """The optimizer steps that are done, and of how many if the run has not ended."""
        done = max((record["step"] for record in self.records), default=0)
        done = max(done, self.saved_step)  # a run that was stopped has saved the steps since its last record
        planned = self.about.get("plan", {}).get("last_step", done)
        return f"{done:,}" if done == planned else f"{done:,} of {planned:,}"

    @property
    def seconds(self) -> float | None:
        """The wall time up to the last record, without the pauses before a start."""
        times = [record["time"] for record in self.records if record.get("time")]
        if not times or not self.about.get("started"):
            return None
        starts = [start["started"] for start in self.starts if start.get("started")]
        spans = itertools.pairwise([*(starts or [min(self.about["started"], *times)]), math.inf])
        return sum(max((when for when in times if start <= when < end), default=start) - start for start, end in spans)

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        """When, how and from which step it was started, each time."""
        return self.about.get("starts", [])

    @property
    def command(self) -> str:
        """The command line that started it last."""
        return shlex.join(["python", *map(str, self.about.get("argv", []))])

    def of_kind(self, kind: str) -> list[Metrics]:
        return [record for record in self.records if record["kind"] == kind]


def main(argv: list[str]) -> None:
    parser = command_parser(__doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="folder of a run or a sweep; several are compared"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: report.html in RUN, or in the folder that holds all of them",
    )
    args = parser.parse_args(argv)
    folders = [folder for named in args.runs for folder in find_runs(named)]
    names = drop_shared([folder.resolve().name for folder in folders])
    names = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    runs = [load_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    output = args.output or Path(os.path.commonpath([named.resolve() for named in args.runs]), "report.html")
    replaced = "; the earlier one is replaced" * output.exists()
    try:
        own_file(output).write_text(render(runs, output.resolve().parent.name), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror}); choose another") from error
    print(f"{short_path(output)}  ({counted(len(runs), 'run')}{replaced})")


def find_runs(folder: Path) -> list[Path]:
    """Return ``folder``, or the runs in it if it is a sweep's, in the order of their numbers."""
    inside = [path.parent for path in folder.glob("*/config.json")]
    inside.sort(key=lambda run: [(part.isdigit() and int(part), part) for part in re.split(r"(\d+)", run.name)])
    return inside if inside and not (folder / "config.json").exists() else [folder]


def drop_shared(names: Sequence[str]) -> list[str]:
    """Return the names of a sweep's runs, ``KEY=VALUE,KEY=VALUE``, without the parts that all of them have."""
    parts = [name.split(",") for name in names]
    shared = set(parts[0]).intersection(*parts) if len(names) > 1 else set()
    kept = [",".join(part for part in each if part not in shared or "=" not in part) for each in parts]
    return kept if all(kept) else list(names)


def load_run(folder: Path, name: str) -> FinishedRun:
    """Read a run's config.json and metrics.jsonl; the run may still be running."""
    about = read_about(folder, RunInfo)
    records = read_metrics(folder) if (folder / METRICS).exists() else []  # before the first step
    found = [re.fullmatch(r"step-(\d{1,18})", path.parent.name) for path in folder.glob("checkpoints/step-*/COMPLETE")]
    saved = [int(match[1]) for match in found if match]
    return FinishedRun(name, about, records, max(saved, default=0))


def render(runs: Sequence[FinishedRun], title: str = "") -> str:
    """Return the page; ``title`` stands for the names of many runs, which are the rows of its tables."""
    many = len(runs) > MANY
    charts = {"runs": [run.name for run in runs], "charts": collect_charts([run.records for run in runs])}
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return (
        Environment(autoescape=True)
        .from_string(page)
        .render(
            runs=runs,
            many=many,
            title=f"{title}: {len(runs)} runs" if many else ", ".join(run.name for run in runs),
            summary=_summary(runs),
            keys=_config_keys(runs),
            environment=_environment(runs),
            charts=Markup(json.dumps(charts, separators=(",", ":")).replace("<", "\\u003c")),
            wbr=Markup("<wbr>"),
        )
    )


def _summary(runs: Sequence[FinishedRun]) -> dict[str, list[str]]:
    rows: dict[str, Callable[[FinishedRun], str]] = {
        "Top-1, last evaluation": lambda run: _percent([record["top1"] for record in run.of_kind("eval")][-1:]),
        "Top-1, best evaluation": _best_top1,
        "Steps": lambda run: run.steps if " of " not in run.steps else f"{run.steps} (unfinished)",
        "Wall time": _wall_time,
        "Images per second, median": _median_speed,
        "Hardware": _hardware,
    }
    return {title: [cell(run) for run in runs] for title, cell in rows.items()}


def _percent(values: Sequence[float]) -> str:
    return f"{values[0]:.2%}" if values else ABSENT


def _best_top1(run: FinishedRun) -> str:
    evaluations = run.of_kind("eval")
    if not evaluations:
        return ABSENT
    best = max(evaluations, key=lambda record: (record["top1"], -record["loss"]))  # as checkpoints/best
    return f"{best['top1']:.2%} at step {best['step']:,}"


def _wall_time(run: FinishedRun) -> str:
    if run.seconds is None:
        return ABSENT
    minutes, seconds = divmod(round(run.seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"


def _median_speed(run: FinishedRun) -> str:
    speeds = [record["samples_per_s"] for record in run.of_kind("train") if record.get("samples_per_s") is not None]
    return f"{statistics.median(speeds):,.0f}" if speeds else ABSENT


def _hardware(run: FinishedRun) -> str:
    hardware = run.about.get("hardware", {})
    processes = run.about.get("plan", {}).get("gpus", 1)
    if not hardware:
        return ABSENT
    name = name_hardware(hardware)
    return f"{processes} x {name}" if hardware["gpu"] else f"{name}, processes: {processes}"


def _config_keys(runs: Sequence[FinishedRun]) -> dict[str, list[str]]:
    """Return the dotted config keys: those whose values are not the same in all runs, or all of a single run's."""
    rows = _align([_flat_text(run.about["config"]) for run in runs])
    return {key: cells for key, cells in rows.items() if len(runs) == 1 or len(set(cells)) > 1}


def _environment(runs: Sequence[FinishedRun]) -> dict[str, list[str]]:
    flat = []
    for run in runs:
        about = {k: v for k, v in run.about.items() if k not in ("name", "config", "plan", "argv", "starts", "started")}
        first = next(iter(run.starts), {}).get("started") or run.about.get("started")
        rows = {"started": _utc(first)} if first else {}
        rows |= {f"start {number}": _describe_start(start) for number, start in enumerate(run.starts, 1)}
        flat.append(rows | _flat_text(about))
    return _align(flat)


def _align(columns: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return ``{key: cells}`` for every key of any column."""
    keys = dict.fromkeys(itertools.chain.from_iterable(columns))
    return {key: [column.get(key, ABSENT) for column in columns] for key in keys}


def _describe_start(start: Mapping[str, Any]) -> str:
    """Return a start as "step 65, 2026-11-22 09:01 UTC, bfloat16, processes: 2"."""
    parts = [f"step {start.get('step', 0):,}", _utc(start["started"]) if start.get("started") else ""]
    parts += [start.get("dtype", ""), f"processes: {start['gpus']}" if "gpus" in start else ""]
    return ", ".join(filter(None, parts))


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _flat_text(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: value if isinstance(value, str) else repr(value) for key, value in flatten(values).items()}
