"""From the command line to a started run."""

import os
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common.checkpoint.resume import add_start, print_changes
from common.config.fields import flatten
from common.engine.collectives import ask_first_rank
from common.engine.compiler import explain_compiler
from common.engine.groups import shutdown
from common.engine.lost_ranks import progress
from common.errors import explain_errors
from common.launch.detect import MPI, Launch, detect_launch, init_distributed
from common.launch.signals import stop_signals
from common.launchers import LAUNCHERS
from common.locks import remove_unused
from common.metrics.batch_finder import BatchFinder
from common.metrics.lr_finder import LearningRateFinder
from common.metrics.measurement import Measurement
from common.metrics.profiler import ProfilerHook
from common.process import at_end, set_variable
from common.provenance import describe_run, package_versions
from common.run.arguments import output_folder, parse_arguments
from common.run.checks import Prepared
from common.run.messages import announce, print_plan
from common.run.prepare import prepare_run
from common.run.reading_order import choose_order
from common.run.replay import Replay
from common.run.run import Run
from common.run.start_point import lock_and_find_start
from common.run.start_warnings import explain_out_of_memory, explain_rate
from common.task import Task
from common.text import print_wrapped

# what runs instead of training, by its flag
MEASUREMENTS = {"find_lr": LearningRateFinder, "find_batch": BatchFinder, "profile": ProfilerHook}


def start_run(argv: list[str], description: str | None, task: Task) -> Run | None:
    """Run all checks, then start the process group and put the config into ``gpc.config``.

    Returns None if there is nothing to train: after ``--dry-run``, and for a finished run.
    """
    args = parse_arguments(argv, description)
    launch = detect_launch(args, os.environ)
    if args.world_size == 1:  # left-over variables would name another process the first
        for variables in LAUNCHERS.values():
            set_variable(variables.rank, None)
    prepared = prepare_run(args, launch, task)
    is_main = launch.rank == 0
    rate = explain_rate(args, prepared.config, task.recipe)
    if args.dry_run:
        if is_main:
            print_plan(args, prepared, task)
            if rate:
                print_wrapped(rate, is_warning=True)
        return None

    _handle_signals_and_errors(launch, prepared)
    init_distributed(launch, prepared.config, shared_by_ranks(args, prepared))
    output = output_folder(args, prepared.config)
    at_end(remove_unused, output)  # A run that is refused leaves no empty folder.
    # One rank reads and locks, so that all decide alike and no two read a changing folder.
    begin = ask_first_rank(lambda: lock_and_find_start(output, args, prepared))
    if begin.finished:
        shutdown()
        if is_main:
            print_wrapped(begin.finished)
        return None

    # Memory, by which the order is chosen, may differ between hosts.
    origin = begin.checkpoint or (output if args.replay else None)
    reading = ask_first_rank(lambda: choose_order(prepared, origin))
    plan = replace(begin.plan, order=reading.order)
    measurement = _build_measurement(args, output, is_main)
    if measurement:
        plan = measurement.limit(plan)
    prepared = prepared._replace(plan=plan)
    metadata = _describe_start(args, argv, task, prepared, begin.checkpoint)
    if is_main:
        if begin.checkpoint:
            print_changes(metadata, begin.checkpoint, output)
        instead = measurement.announcement if measurement else ""
        announce(args.config, prepared, begin.checkpoint, reading.why, instead, rate)
    return Run(plan, output, is_main, metadata, begin.checkpoint, measurement)


def _handle_signals_and_errors(launch: Launch, prepared: Prepared) -> None:
    """Stop on signals from now on, and explain errors of memory and compiler."""
    at_end(explain_errors)  # forgets them
    explain_errors(
        lambda error: explain_out_of_memory(error, prepared),
        explain_compiler,
    )
    # a launcher that is killed cannot pass a signal on
    has_parent = launch.launcher in MPI or "TORCHELASTIC_RUN_ID" in os.environ
    stop_signals.install(has_parent, progress, prepared.config["TIMEOUT"])


def _build_measurement(args: Namespace, output: Path, is_main: bool) -> Measurement | None:
    if args.replay:
        return Replay(output, args.replay, is_main, args.replay_to)
    for flag, build in MEASUREMENTS.items():
        steps = getattr(args, flag)
        if steps:
            return build(output, steps, is_main)
    return None


def _describe_start(
    args: Namespace,
    argv: list[str],
    task: Task,
    prepared: Prepared,
    checkpoint: Path | None,
) -> dict[str, Any]:
    """Return the content of config.json: on every rank, as its hooks read the config in it."""
    metadata = {
        "name": Path(args.config).stem,
        "task": task.name,
        "config": prepared.config,
        "plan": prepared.plan.to_dict(),
        "init_classes": args.classes or args.class_order,
        "data": asdict(prepared.data),  # pyright: ignore[reportArgumentType]
        **describe_run(argv),
    }
    return metadata | ask_first_rank(lambda: add_start(metadata, checkpoint))


def shared_by_ranks(args: Namespace, prepared: Prepared) -> dict[str, str]:
    """Return what must be the same on all ranks of a run, by name, as text.

    The data may lie elsewhere on each node, which has its own number of workers.
    """
    flags = ("world_size", "output", "resume", "allow_change", *MEASUREMENTS)
    shared: dict[str, Any] = {f"--{flag.replace('_', '-')}": getattr(args, flag) for flag in flags}
    # Kernels of other versions round otherwise, and ranks would drift apart.
    shared |= package_versions()
    data = prepared.data
    if data:
        shared["data"] = f"{data.train_samples:,} images of fingerprint {data.fingerprint[:12]}"
    local = ("DATA.root", "DATA.download", "DATA.workers")
    settings = flatten(prepared.config).items()
    shared |= {key: value for key, value in settings if key not in local}
    shared["fp16.dtype"] = prepared.plan.dtype  # its default depends on the device
    return {key: str(value) for key, value in shared.items()}
