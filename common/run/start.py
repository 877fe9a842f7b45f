"""From the command line to a started run: config, plan, checks, launch, output folder."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from common.checkpoint.hook import CheckpointHook
from common.checkpoint.pretrained import load_pretrained
from common.checkpoint.resume import ask_first_rank, choose_checkpoint, note_start
from common.checkpoint.save import CONFIG, METRICS, newest_checkpoint
from common.colossal import (
    BaseHook,
    MixedPrecision,
    ParallelMode,
    WatchHook,
    gpc,
    name_dtype,
    shutdown,
)
from common.config.batch_plan import DataSummary, Plan, build_plan, shrink_micro_batch
from common.config.load import data_root, load_config
from common.errors import UserError
from common.estimate.cluster import parse_cluster
from common.estimate.dry_run import print_dry_run
from common.files import lock_folder, unlock_folder
from common.launch.launcher import detect_launch, start
from common.launch.stop_signals import exit_code, signal_name, stop_signals
from common.metrics.hook import MetricsHook
from common.metrics.lr_finder import LearningRateFinder
from common.metrics.profiler import ProfilerHook
from common.metrics.provenance import describe_run
from common.metrics.writers import read_metrics
from common.model.ema import EmaHook
from common.model.flops import peak_images_per_s
from common.run.arguments import parse_arguments
from common.run.checks import check_builds, check_classes

Measurement = LearningRateFinder | ProfilerHook


@dataclass
class Run:
    """A started run: its plan, its folder, and whether this process is the one that writes and prints."""

    plan: Plan
    output: Path
    is_main: bool
    device: torch.device
    about: dict[str, Any]  # what config.json holds
    start_from: Path | None  # the checkpoint to go on from
    measurement: Measurement | None  # what this run is for, instead of training

    @property
    def data_parallel(self) -> dict[str, int]:
        """This process's place among those that see different samples: ``dp_rank`` of ``dp_size``."""
        return dict(dp_rank=gpc.get_local_rank(ParallelMode.DATA), dp_size=self.plan.data_parallel)

    def load_init(self, model: nn.Module) -> None:
        """Give ``model``, before it is sharded, the weights that ``INIT`` names, unless the run goes on."""
        source = self.about["config"]["INIT"]
        if not source or self.start_from is not None:
            return
        done = ask_first_rank(lambda: load_pretrained(model, source))
        if not self.is_main:
            load_pretrained(model, source)
        else:
            print(done, flush=True)

    def build_hooks(self, model: nn.Module, optimizer: Optimizer) -> list[BaseHook]:
        """Create the run's folder, now that nothing in the config is left to refuse, and return the hooks."""
        if self.measurement:
            return [WatchHook(), self.measurement]
        config = self.about["config"]
        if self.is_main:
            self._create_folder()
        start = self.about["starts"][-1]["step"]
        peak = peak_images_per_s(config["MODEL"], config["fp16"], self.plan.gpus, self.device)
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
        return [WatchHook(), metrics, *ema, checkpoints]

    def _create_folder(self) -> None:
        """Write config.json, and the figures up to the checkpoint."""
        try:
            partial = self.output / ".config.partial"
            partial.write_text(json.dumps(self.about, indent=2, default=str) + "\n")
            partial.replace(self.output / CONFIG)
            figures = b"" if self.start_from is None else (self.start_from / METRICS).read_bytes()
            (self.output / METRICS).write_bytes(figures)
        except OSError as error:
            raise UserError(f"--output {self.output}: cannot be written ({error.strerror}); choose another") from error

    def finish(self) -> None:
        """Leave the process group and say where everything is; the last line is the final top-1.

        After a signal, exits as `exit_code` says.
        """
        shutdown()
        unlock_folder(self.output)
        checkpoint = newest_checkpoint(self.output / "checkpoints")
        stopped = stop_signals.agreed
        stop_signals.restore()
        if stopped:
            if self.is_main:
                print(f"{signal_name(stopped)}: stopped; the same command goes on from {checkpoint}", flush=True)
            sys.exit(exit_code(stopped))
        if self.measurement or not self.is_main:
            return
        print(f"curves       {self.output}/loss.jpeg {self.output}/acc.jpeg")
        print(f"checkpoint   {checkpoint}")
        print(f"tensorboard  tensorboard --logdir {self.output}/tensorboard")
        print(f"top1={self._last_top1()}", flush=True)

    def _last_top1(self) -> str:
        try:
            last = [record for record in read_metrics(self.output) if record["kind"] == "eval"][-1]
        except (OSError, IndexError):  # the disk was full, or the folder is gone: the writers have warned of it
            return "?"
        return f"{last['top1']:.4f}"


def start_run(
    argv: list[str], description: str | None, describe_data: Callable[[Mapping[str, Any]], DataSummary]
) -> Run | None:
    """Check everything that can be checked, then start the process group; the config is then in ``gpc.config``.

    ``describe_data`` counts the data set that the config's ``DATA`` names; config.json holds the name of its module, so
    that what comes after the run finds the loaders of a task it does not know. Returns None after ``--dry-run``, which
    needs neither data nor GPUs.
    """
    args = parse_arguments(argv, description)
    config = load_config(args.config, [*args.set, *([f"INIT={args.init}"] if args.init else [])])
    config["INIT"] = config["INIT"] and str(Path(config["INIT"]).resolve())
    launch = detect_launch(args, os.environ)
    gpus = launch.world_size
    if args.dry_run and launch.launcher == "single":
        gpus = args.gpus or config["GPUS"]
    data = None
    if not args.dry_run or config["DATA"]["root"] or os.environ.get("DATA"):
        config["DATA"]["root"] = data_root(config)
        data = describe_data(config["DATA"])
        config["MODEL"]["num_classes"] = check_classes(config["MODEL"]["num_classes"], data)
    if args.dry_run:
        config = shrink_micro_batch(config, gpus)
    plan = build_plan(config, gpus, data)
    config["TOTAL_BATCH_SIZE"] = plan.total_batch
    precision = check_builds(config, plan)
    plan = replace(plan, dtype=name_dtype(precision.dtype))
    config["gradient_accumulation"] = plan.accumulation
    if args.dry_run:
        print_dry_run(config, plan, data, parse_cluster(args) if args.gpus else None)
        return None
    assert data is not None
    stop_signals.install(follow_parent=launch.launcher == "torch")
    output = Path(args.output or Path("outputs") / Path(args.config).stem).resolve()
    start(launch, config)
    ask_first_rank(lambda: lock_folder(output))
    measurement = _build_measurement(args, output, launch.rank == 0)
    if measurement:  # from the first step on, and in as many epochs as it takes
        steps = measurement.total_steps
        plan = replace(plan, epochs=steps, last_step=steps, total_steps=max(steps, plan.total_steps))
    start_from = None if measurement else ask_first_rank(lambda: choose_checkpoint(args.resume, output))
    if start_from is not None:  # its weights take the place of those that it once started from, which stay on record
        config["INIT"] = json.loads((start_from / CONFIG).read_text())["config"].get("INIT")
    about = {"name": Path(args.config).stem, "config": config, "plan": asdict(plan), **describe_run(argv)}
    about["data"] = {"loaders": describe_data.__module__, **asdict(data)}
    about["starts"] = ask_first_rank(lambda: note_start(about, data, start_from))
    run = Run(plan, output, launch.rank == 0, _device(), about, start_from, measurement)
    if run.is_main:
        _announce(args.config, config, plan, data)
        _announce_precision(precision)
    return run


def _build_measurement(args: argparse.Namespace, output: Path, is_main: bool) -> Measurement | None:
    if args.find_lr:
        return LearningRateFinder(output, args.find_lr, is_main)
    return ProfilerHook(output, args.profile, is_main) if args.profile else None


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _announce(name: str, config: Mapping[str, Any], plan: Plan, data: DataSummary) -> None:
    print(
        f"{name}: {data.train_samples:,} training and {data.eval_samples:,} evaluation images, "
        f"{data.num_classes} classes\n"
        f"global batch {plan.batch_formula}\n"
        f"{plan.steps_per_epoch} steps an epoch, {plan.last_step} of {plan.total_steps} steps; "
        f"{config['OPTIMIZER']['name']}, learning rate {config['LEARNING_RATE']} after {plan.warmup_steps} steps of "
        f"warm-up, then {config['LR_SCHEDULE']} to 0",
        flush=True,
    )


def _announce_precision(precision: MixedPrecision) -> None:
    if precision.note:
        print(precision.note, flush=True)
    if precision.warning:
        print(precision.warning, file=sys.stderr, flush=True)
