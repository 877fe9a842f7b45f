"""What a step's time goes into, operator by operator, as torch's profiler sees it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import EventList, FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, schedule

from common.colossal import BaseHook, Trainer
from common.table import format_table

WARMUP = 5  # steps before those that are recorded, the last of them with the profiler running
ROWS = 10


class ProfilerHook(BaseHook):
    """Record ``steps`` optimizer steps on rank 0, after `WARMUP` others, and end the training without evaluating.

    Writes trace.json, for https://ui.perfetto.dev or chrome://tracing, and operators.txt to ``folder``/profile.
    """

    def __init__(self, folder: Path, steps: int, is_main: bool):
        super().__init__(priority=0)
        self.folder, self.steps, self.is_main = folder / "profile", steps, is_main
        self.total_steps = WARMUP + steps

    def before_train(self, trainer: Trainer) -> None:
        if self.is_main:
            self.profile = profile(
                activities=_activities(),
                schedule=schedule(wait=WARMUP - 1, warmup=1, active=self.steps, repeat=1),
                on_trace_ready=self._write,
            )
            self.profile.start()

    def after_train_iter(self, trainer: Trainer, *result: Any) -> None:
        if not trainer.update_done:
            return
        if self.is_main:
            self.profile.step()
        trainer.stopping = trainer.step == self.total_steps
        trainer.evaluated_step = trainer.step  # none is due where an epoch ends

    def after_train(self, trainer: Trainer) -> None:
        if self.is_main:
            self.profile.stop()

    def _write(self, recorded: profile) -> None:
        self.folder.mkdir(exist_ok=True)
        recorded.export_chrome_trace(str(self.folder / "trace.json"))
        tables = describe_operators(recorded.key_averages(), self.steps)
        (self.folder / "operators.txt").write_text(tables + "\n")
        print(f"{tables}\ntrace        {self.folder}/trace.json\noperators    {self.folder}/operators.txt", flush=True)


def describe_operators(events: EventList, steps: int) -> str:
    """Return a table of the operators that take most time themselves on the CPU, and on the GPU if there is one."""
    tables = [_table("CPU", events, "self_cpu_time_total", steps)]
    if torch.cuda.is_available():
        tables.append(_table("GPU", events, "self_device_time_total", steps))
    return "\n\n".join(tables)


def _table(device: str, events: Iterable[FunctionEventAvg], key: str, steps: int) -> str:
    def microseconds(event: FunctionEventAvg) -> float:
        return getattr(event, key)

    events = [event for event in events if not event.key.startswith("ProfilerStep")]  # pyright: ignore[reportOptionalMemberAccess]
    total = sum(map(microseconds, events))
    rows = [
        {
            f"{device}: operator": event.key[:60],  # pyright: ignore[reportOptionalSubscript]
            "ms a step": f"{microseconds(event) / 1e3 / steps:.3f}",
            "share": f"{microseconds(event) / total:.1%}",
            "calls a step": f"{event.count / steps:g}",
        }
        for event in sorted(events, key=microseconds, reverse=True)[:ROWS]
    ]
    return format_table(rows)


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
