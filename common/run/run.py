"""A started run: what a training script gets from `start_run` and calls while it builds, trains and ends."""

import sys
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from common.checkpoint.hook import CheckpointHook
from common.checkpoint.pretrained import load_pretrained
from common.checkpoint.resume import ask_first_rank
from common.checkpoint.save import newest_checkpoint
from common.colossal import BaseHook, ParallelMode, gpc, shutdown
from common.config.batch_plan import Plan
from common.files import short_path, unlock_folder
from common.launch.stop_signals import exit_code, signal_name, stop_signals
from common.metrics.hook import MetricsHook
from common.metrics.lr_finder import LearningRateFinder
from common.metrics.profiler import ProfilerHook
from common.model.ema import EmaHook
from common.model.flops import peak_images_per_s
from common.run.folder import last_top1, write_start

Measurement = LearningRateFinder | ProfilerHook


@dataclass
class Run:
    """A started run: its plan, its folder, and whether this process is the one that writes and prints."""

    plan: Plan
    output: Path
    is_main: bool
    device: torch.device
    about: dict[str, Any]  # what config.json holds
    start_from: Path | None  # the checkpoint to resume from
    measurement: Measurement | None  # what this run is for, instead of training

    @property
    def data_parallel(self) -> dict[str, int]:
        """This process's place among those that see different samples: ``dp_rank`` of ``dp_size``."""
        return dict(dp_rank=gpc.get_local_rank(ParallelMode.DATA), dp_size=self.plan.data_parallel)

    def load_init(self, model: nn.Module) -> None:
        """Give ``model``, before it is sharded, the weights that ``INIT`` names, unless the run resumes."""
        source = self.about["config"]["INIT"]
        if not source or self.start_from is not None:
            return
        done = ask_first_rank(lambda: load_pretrained(model, source))
        if not self.is_main:
            load_pretrained(model, source)
        else:
            print(done, flush=True)

    def build_hooks(self, model: nn.Module, optimizer: Optimizer) -> list[BaseHook]:
        """Write the run's folder, now that nothing in the config is left to refuse, and return the hooks."""
        if self.measurement:
            return [self.measurement]
        config = self.about["config"]
        if self.is_main:
            write_start(self.output, self.about, self.start_from)
        start = self.about["starts"][-1]["step"]
        peak = peak_images_per_s(config["MODEL"], config["fp16"], self.plan.gpus, self.device, config["FREEZE"])
        metrics = MetricsHook(
            self.plan, self.output, is_main=self.is_main, peak_samples_per_s=peak, start=start, **config["LOG"]
        )
        ema = [EmaHook(model, config["EMA"])] if config["EMA"] else []
        checkpoints = CheckpointHook(
            self.output / "checkpoints",
            model,
            optimizer,
            metrics,
            about=self.about,
            every=config["CHECKPOINT_EVERY"],
            keep=config["KEEP"],
            start_from=self.start_from,
            averages=ema[0].averages if ema else None,
        )
        return [metrics, *ema, checkpoints]

    def finish(self) -> None:
        """Leave the process group and print where everything is; the last line is the final top-1.

        After a signal, exits as `exit_code` says.
        """
        shutdown()
        unlock_folder(self.output)
        checkpoint = newest_checkpoint(self.output / "checkpoints")
        stopped = stop_signals.agreed
        stop_signals.restore()
        if stopped:
            if self.is_main:
                print(f"{signal_name(stopped)}: stopped; rerun the command to resume from {checkpoint}", flush=True)
            sys.exit(exit_code(stopped))
        if self.measurement or not self.is_main:
            return
        shown = short_path(self.output)
        print(f"curves       {shown}/loss.jpeg\n             {shown}/acc.jpeg")
        print(f"checkpoint   {checkpoint and short_path(checkpoint)}")
        print(f"tensorboard  tensorboard --logdir {quote(f'{shown}/tensorboard')}")
        report = short_path(Path(__file__).parents[2] / "scripts" / "report.py")
        print(f"next         python {quote(report)} {quote(shown)}  # or evaluate.py, predict.py, export.py")
        print(f"top1={last_top1(self.output)}", flush=True)
