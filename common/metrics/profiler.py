"""Steps recorded with PyTorch's profiler: ``--profile``."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, schedule

from common.engine.trainer import Trainer
from common.files import short_path
from common.metrics.measurement import Measurement

WARMUP = 5  # steps before the profiled ones; the profiler runs during the last of them


class ProfilerHook(Measurement):
    """Record steps on rank 0 after `WARMUP` others.

    Writes profile/trace.json, for https://ui.perfetto.dev or chrome://tracing, and
    profile/operators.txt, tables of the operators with the most CPU time and, if there is a GPU,
    GPU time.
    """

    writes = "trace.json and operators.txt, of all but the first steps,"
    plain = "--profile"

    def __init__(self, folder: Path, steps: int, is_main: bool):
        super().__init__(folder / "profile", WARMUP + steps, is_main)
        self.profile: Any = None

    def before_train(self, trainer: Trainer) -> None:
        super().before_train(trainer)
        if self.is_main:
            # The tracer's start is slow: `warmup` records a step and drops it.
            steps = schedule(wait=WARMUP - 1, warmup=1, active=self.total_steps - WARMUP, repeat=1)
            self.profile = profile(
                schedule=steps,
                on_trace_ready=self._write_profile,
                acc_events=True,  # torch 2.11 would warn that it forgets events
            )
            self.profile.start()

    def after_train_iter(self, trainer: Trainer, *result: Any) -> None:
        super().after_train_iter(trainer)
        if self.is_main and trainer.update_done:
            self.profile.step()

    def after_train(self, trainer: Trainer) -> None:
        super().after_train(trainer)
        if self.is_main:
            self.profile.stop()
            self.profile = None

    def close(self) -> None:
        super().close()
        if self.profile:  # the training has failed
            self.profile.on_trace_ready = None
            self.profile.stop()

    def _write_profile(self, recorded: profile) -> None:
        """Write and print what was recorded."""
        self.folder.mkdir(exist_ok=True)
        recorded.export_chrome_trace(str(self.folder / "trace.json"))
        keys = ["self_cpu_time_total"]
        if torch.cuda.is_available():
            keys.append("self_device_time_total")
        events = recorded.key_averages()
        tables = "\n".join(
            events.table(sort_by=key, row_limit=10, max_name_column_width=60) for key in keys
        )
        (self.folder / "operators.txt").write_text(tables + "\n")
        shown = short_path(self.folder)
        print(tables)
        print(f"trace        {shown}/trace.json\noperators    {shown}/operators.txt", flush=True)
