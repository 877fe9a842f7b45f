"""From the command line to a started run."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from common.checkpoint.content import CONFIG, read_about
from common.checkpoint.resume import AUTO, NEVER, ask_first_rank, note_start
from common.checkpoint.weights import fit_pretrained
from common.colossal import MixedPrecision, progress, shutdown
from common.config.load import named_root
from common.config.plan import DataSummary, Plan
from common.errors import AT_END, UserError
from common.files import lock_folder
from common.launch.launcher import detect_launch, set_data_key, start
from common.launch.stop_signals import stop_signals
from common.metrics.lr_finder import LearningRateFinder
from common.metrics.profiler import ProfilerHook
from common.metrics.provenance import describe_run
from common.model.vit import build_model
from common.planner.cluster import parse_cluster
from common.planner.dry_run import describe_options, print_dry_run
from common.run.arguments import parse_arguments
from common.run.folder import find_start
from common.run.on_cpu import explain_cpu
from common.run.prepare import prepare_run
from common.run.read_order import choose_order, warn_of_order
from common.run.run import Measurement, Run
from common.table import print_wrapped
from common.task import Task


def start_run(argv: list[str], description: str | None, task: Task) -> Run | None:
    """Run all checks, then start the process group and put the config into ``gpc.config``.

    config.json records the task's name, by which tools find it. Returns None if there is nothing to train: after
    ``--dry-run``, which needs neither data nor GPUs, and for a finished run.
    """
    args = parse_arguments(argv, description)
    launch = detect_launch(args, os.environ)
    prepared = config, plan, data, precision = prepare_run(args, launch, task)
    if args.dry_run:
        if launch.rank == 0:
            notes = {"weights": _check_init(config, args)}
            if data:
                notes["classes"] = _spare_classes(config, data)
                config["DATA"]["order"], notes["reading"] = choose_order(config, data, plan.data_parallel)
            if not data and (root := named_root(config)):
                notes["data"] = f"{root} is not on this machine: time for {task.train_samples:,} images"
            print_dry_run(config, plan, data, parse_cluster(args) if args.gpus else None, notes, task.train_samples)
        return None
    assert data is not None
    AT_END.callback(stop_signals.restore)
    stop_signals.install(launch.launcher == "torch", progress, config["TIMEOUT"])
    output = Path(args.output or config["OUTPUT"] or Path("outputs") / Path(args.config).stem).resolve()
    start(launch, config)
    if args.resume in (AUTO, NEVER):  # before anything is written; an existing run is past its start
        ask_first_rank(lambda: (output / CONFIG).exists() or _check_init(config, args))
    measurement, start_from = _build_measurement(args, output, launch.rank == 0), None
    if measurement:  # from the first step, over as many epochs as needed
        ask_first_rank(lambda: lock_folder(output))
        steps = measurement.total_steps
        plan = replace(plan, epochs=steps, last_step=steps, total_steps=max(steps, plan.total_steps))
    else:
        start_from, finished = ask_first_rank(lambda: find_start(output, args, prepared))
        if finished:
            _leave(finished, launch.rank == 0)
            return None
    if start_from is not None:  # its weights replace those of INIT; the key is kept as a record
        config["INIT"] = ask_first_rank(lambda: read_about(start_from)["config"].get("INIT"))
    order, reading = ask_first_rank(lambda: choose_order(config, data, plan.data_parallel, start_from))
    set_data_key(config, "order", order)
    about = {"name": Path(args.config).stem, "task": task.name, "config": config, "plan": asdict(plan)}
    about |= {"data": asdict(data), **describe_run(argv)}
    about["starts"] = ask_first_rank(lambda: note_start(about, start_from))
    if launch.rank == 0:
        warnings = explain_cpu(config, plan.total_batch, plan.gpus), _spare_classes(config, data)
        for warning in filter(None, (*warnings, warn_of_order(config["DATA"], data))):
            print_wrapped(warning, is_warning=True)
        _announce(args.config, config, plan, data, reading)
        _announce_precision(precision)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return Run(plan, output, launch.rank == 0, device, about, start_from, measurement)


def _check_init(config: Mapping[str, Any], args: argparse.Namespace) -> str:
    """Raise `UserError` if INIT's weights do not fit, or for FREEZE without INIT; return the message after loading.

    MODEL.heads counts as stated if set on the command line, or in a config file that also sets INIT.
    """
    if not config["INIT"]:
        if config["FREEZE"] and args.resume in (AUTO, NEVER):
            raise UserError(
                f"FREEZE={config['FREEZE']!r} without INIT trains a head on random weights: add --init or omit FREEZE"
            )
        return ""
    keys = {setting.partition("=")[0] for setting in args.set}
    heads_stated = bool(keys & {"MODEL", "MODEL.heads"}) or not (args.init or "INIT" in keys)
    classes = config["MODEL"]["num_classes"]
    with torch.device("meta"):
        model = build_model(**config["MODEL"] | {"num_classes": classes or 1})
    _, done = fit_pretrained(model, config["INIT"], heads_stated=heads_stated)
    return done if classes else done.partition(";")[0]


def _spare_classes(config: Mapping[str, Any], data: DataSummary) -> str:
    """Return a warning where the head has more classes than the data set, unless it may be that of INIT's weights."""
    classes = config["MODEL"]["num_classes"]
    if config["INIT"] or classes == data.num_classes:
        return ""
    return (
        f"warning: MODEL.num_classes={classes} is more than the data set's {data.num_classes} classes; None takes as "
        "many as it has"
    )


def _leave(why: str, is_main: bool) -> None:
    shutdown()
    stop_signals.restore()
    if is_main:
        print_wrapped(why)


def _build_measurement(args: argparse.Namespace, output: Path, is_main: bool) -> Measurement | None:
    if args.find_lr:
        return LearningRateFinder(output, args.find_lr, is_main)
    return ProfilerHook(output, args.profile, is_main) if args.profile else None


def _announce(name: str, config: Mapping[str, Any], plan: Plan, data: DataSummary, reading: str) -> None:
    lines = [
        f"{name}: {data.train_samples:,} training and {data.eval_samples:,} evaluation images, "
        f"{data.num_classes} classes",
        f"global batch {plan.batch_formula('GPU' if torch.cuda.is_available() else 'process')}",
        f"{plan.last_step:,} of {plan.total_steps:,} steps, {plan.steps_per_epoch:,} per epoch",
        f"{config['OPTIMIZER']['name']}, learning rate {config['LEARNING_RATE']} after {plan.warmup_steps:,} steps of "
        f"warm-up, then {config['LR_SCHEDULE']} to 0",
        *(f"{key}: {effect}" for key, effect in describe_options(config, plan).items()),
    ]
    for line in [*lines, f"reading {reading}"] if reading else lines:
        print_wrapped(line)


def _announce_precision(precision: MixedPrecision) -> None:
    if precision.note:
        print_wrapped(precision.note)
    if precision.warning:
        print_wrapped(precision.warning, is_warning=True)
