"""Where the time of a step goes: its phases in every record, and a profile of a few steps by torch.profiler."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, schedule

from common.colossal import BaseHook, Trainer
from common.files import short_path

WARMUP = 5  # steps before the recorded ones; the profiler runs during the last of them
ROWS = 10


class PhaseClock:
    """Add up the seconds between the beginnings of a step's phases, as `Engine.on_phase` names them.

    On a GPU by CUDA events, which do not wait for it.
    """

    def __init__(self, device: str):
        self.is_cuda = device == "cuda"
        self.marks: list[tuple[str, Any]] = []

    def __call__(self, phase: str) -> None:
        mark: Any = time.perf_counter()
        if self.is_cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self.marks.append((phase, mark))

    def read(self) -> dict[str, float]:
        """Return the seconds by phase since the last call; the device must have finished its work."""
        seconds = {"forward": 0.0, "backward": 0.0, "rest": 0.0}
        for (phase, start), (_, end) in pairwise(self.marks):
            seconds[phase] += start.elapsed_time(end) / 1e3 if self.is_cuda else end - start
        self.marks.clear()
        return seconds


class ProfilerHook(BaseHook):
    """Record ``steps`` optimizer steps on rank 0 after `WARMUP` steps, and end the training without evaluation.

    Writes to ``folder``/profile: trace.json, for https://ui.perfetto.dev or chrome://tracing, and operators.txt, tables
    of the operators with the most CPU time and, if there is a GPU, GPU time.
    """

    def __init__(self, folder: Path, steps: int, is_main: bool):
        super().__init__(priority=0)
        self.folder, self.steps, self.is_main = folder / "profile", steps, is_main
        self.total_steps = WARMUP + steps

    def before_train(self, trainer: Trainer) -> None:
        if self.is_main:
            self.profile = profile(
                schedule=schedule(wait=WARMUP - 1, warmup=1, active=self.steps, repeat=1), on_trace_ready=self._write
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
        keys = ["self_cpu_time_total", *(["self_device_time_total"] if torch.cuda.is_available() else [])]
        events = recorded.key_averages()
        tables = "\n".join(events.table(sort_by=key, row_limit=ROWS, max_name_column_width=60) for key in keys)
        (self.folder / "operators.txt").write_text(tables + "\n")
        shown = short_path(self.folder)
        print(f"{tables}\ntrace        {shown}/trace.json\noperators    {shown}/operators.txt", flush=True)
