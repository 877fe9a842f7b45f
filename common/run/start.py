"""From the command line to a started run."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common.checkpoint.content import CONFIG, ConfigFile, read_about, read_trainer_state
from common.checkpoint.resume import (
    AUTO,
    NEVER,
    check_changes,
    check_data,
    choose_checkpoint,
    finished_step,
    note_start,
)
from common.config.fields import flatten
from common.config.plan import Plan
from common.data.sampler import window_bytes
from common.engine.collectives import ask_first_rank
from common.engine.compiler import explain_compiler
from common.engine.groups import shutdown
from common.engine.lost_ranks import progress
from common.errors import UserError, at_end, explain_errors
from common.files import lock_folder, remove_unused, unlock_folder
from common.hardware import describe_run, memory_bytes, package_versions
from common.launch.detect import MPI, detect_launch, init_distributed
from common.launch.signals import stop_signals
from common.launchers import LAUNCHERS
from common.metrics.lr_finder import LearningRateFinder
from common.metrics.profiler import ProfilerHook
from common.model.flops import peak_images_per_s
from common.planner.cluster import DECODE, cluster_here, parse_cluster
from common.planner.dry_run import describe_options, print_dry_run
from common.planner.prediction import Planner
from common.run.prepare import (
    Prepared,
    check_init,
    output_folder,
    parse_arguments,
    prepare_run,
    spare_classes,
)
from common.run.run import Run, read_evaluations
from common.task import Task, named_root
from common.text import first_line, print_wrapped

RIGHT_CUDNN = 91_501  # 9.15.1


def start_run(argv: list[str], description: str | None, task: Task) -> Run | None:
    """Run all checks, then start the process group and put the config into ``gpc.config``.

    Returns None if there is nothing to train: after ``--dry-run``, and for a finished run.
    """
    args = parse_arguments(argv, description)
    launch = detect_launch(args, os.environ)
    if args.world_size == 1:  # left-over variables would name another process the first
        for variables in LAUNCHERS.values():
            os.environ.pop(variables.rank, None)
    prepared = prepare_run(args, launch, task)
    is_main = launch.rank == 0
    config = prepared.config
    if args.dry_run:
        if is_main:
            _print_plan(args, prepared, task)
        return None
    at_end(stop_signals.restore)
    explain_errors(
        lambda error: explain_out_of_memory(error, config, prepared.plan), explain_compiler
    )
    has_parent = launch.launcher in MPI or "TORCHELASTIC_RUN_ID" in os.environ
    stop_signals.install(has_parent, progress, config["TIMEOUT"])
    init_distributed(launch, config, shared_by_ranks(args, prepared))
    output = output_folder(args, config)
    at_end(remove_unused, output)
    begin = ask_first_rank(lambda: find_start(output, args, prepared))
    if begin.finished:
        shutdown()
        if is_main:
            print_wrapped(begin.finished)
        return None
    start_from = begin.checkpoint
    reading = ask_first_rank(lambda: choose_order(prepared, start_from))
    plan = replace(prepared.plan, order=reading.order)
    measurement = None
    if steps := args.find_lr or args.profile:
        measurement = (LearningRateFinder if args.find_lr else ProfilerHook)(output, steps, is_main)
        steps = measurement.total_steps  # from the first step, over as many epochs as needed
        plan = replace(
            plan, epochs=steps, last_step=steps, total_steps=max(steps, plan.total_steps)
        )
    about = {
        "name": Path(args.config).stem,
        "task": task.name,
        "config": config,
        "plan": asdict(plan),
    }
    about["init_classes"] = args.classes or args.class_order
    about |= {"data": asdict(prepared.data), **describe_run(argv)}  # pyright: ignore[reportArgumentType]
    about |= ask_first_rank(lambda: note_start(about, start_from))
    if is_main:
        _announce(
            args.config,
            prepared._replace(plan=plan),
            reading.why,
            measurement.announcement if measurement else "",
            describe_sides(start_from or config["INIT"], prepared.data),
        )
    return Run(plan, output, is_main, about, start_from, measurement)


def shared_by_ranks(args: argparse.Namespace, prepared: Prepared) -> dict[str, str]:
    """Return what must be the same on all ranks of a run, by name, as text.

    The data may lie elsewhere on each node, which has its own number of workers.
    """
    flags = ("world_size", "output", "resume", "allow_change", "find_lr", "profile")
    shared: dict[str, Any] = {f"--{flag.replace('_', '-')}": getattr(args, flag) for flag in flags}
    shared |= package_versions()
    if data := prepared.data:
        shared["data"] = f"{data.train_samples:,} images of fingerprint {data.fingerprint[:12]}"
    own = ("DATA.root", "DATA.download", "DATA.workers")
    settings = flatten(prepared.config).items()
    shared |= {key: value for key, value in settings if key not in own}
    shared["fp16.dtype"] = prepared.plan.dtype  # whose default depends on the device
    return {key: str(value) for key, value in shared.items()}


@dataclass(frozen=True)
class Beginning:
    """Where a run begins: at a checkpoint, or at step 0 without one."""

    checkpoint: Path | None = None
    finished: str = ""  # why there is nothing to train


def find_start(output: Path, args: argparse.Namespace, prepared: Prepared) -> Beginning:
    """Lock ``output``, and find where the run into it begins.

    Raises `UserError` if the run cannot be resumed this way, before it changes any file; only a
    checkpoint whose replacement was interrupted is put back.
    """
    config, plan, data, _ = prepared
    if (
        args.resume in (AUTO, NEVER) and not (output / CONFIG).exists()
    ):  # an existing run is past its INIT
        check_init(config, args, data)
    lock_folder(output)
    if args.find_lr or args.profile:
        return Beginning()
    path = choose_checkpoint(args.resume, output)
    if path is not None:
        check_data(path, data, args.allow_change)  # pyright: ignore[reportArgumentType]
        check_changes(path, config, output, args.allow_change, plan.last_step)
        longer = "MAX_STEPS" if plan.last_step < plan.total_steps else "NUM_EPOCHS"
        if (
            path.is_relative_to(output)
            and (step := finished_step(path, plan.last_step)) is not None
        ):
            unlock_folder(output)
            top1 = next(
                (f"{record['top1']:.4f}" for record in reversed(read_evaluations(output))), "?"
            )
            return Beginning(
                path,
                f"{output}: this run is finished, at step {step} with top1={top1}; nothing was "
                f"trained. Extend it with --set {longer}=N (now {config[longer]}), or start "
                "another with --output DIR",
            )
        is_branch = not path.is_relative_to(output)
        if (step := read_trainer_state(path)["trainer"]["step"]) + is_branch > plan.last_step:
            raise UserError(
                f"{longer}={config[longer]} ends at step {plan.last_step}, {path} is at {step}: "
                "raise it"
            )
    elif (output / CONFIG).exists() and any(
        record["step"] >= read_about(output, ConfigFile)["plan"]["last_step"]
        for record in read_evaluations(output)
    ):
        raise UserError(
            f"{output} holds a finished run without checkpoints, whose record would be "
            "overwritten; choose another "
            "--output, or remove it"
        )
    return Beginning(path)


def describe_sides(origin: Any, now: Any) -> str:
    """Return what is known of validation images that the run or checkpoint ``origin`` trained on.

    "" for the same data set, one of other classes, and one with its own validation images. A run's
    record has no names of images, but the rule by which they were held out.
    """
    try:
        then = read_about(Path(origin))["data"]
    except (UserError, TypeError):  # weights from elsewhere, or none
        return ""
    is_same = then["fingerprint"] == now.fingerprint
    if is_same or not now.held_out or {*then["class_names"]}.isdisjoint(now.class_names):
        return ""
    if "name" in now.held_out and now.held_out == then.get("held_out"):
        return (
            f"held out: {now.held_out}, as in {origin}: images keep their sides, but one in each "
            "class of a few may have moved"
        )
    return (
        f"warning: {origin} may have been trained on up to {now.eval_samples:,} of the "
        f"{now.eval_samples:,} validation images, which it held out in another way"
    )


@dataclass(frozen=True)
class Reading:
    """The order in which the training shards are read, None without shards."""

    order: str | None = None
    why: str = ""


def choose_order(prepared: Prepared, start_from: Path | None = None) -> Reading:
    """Choose the order in which the training shards are read.

    A resumed run keeps its order on any host.
    """
    config, plan, data, _ = prepared
    if not data or not data.shard_bytes:
        return Reading()
    options = config["DATA"]
    memory = memory_bytes()
    is_large = data.shard_bytes > memory
    if order := options["order"]:
        why = "set by DATA.order"
    elif saved := start_from and read_about(start_from)["plan"]["order"]:
        order = saved
        why = "as before"
    else:
        order = "blocks" if is_large and data.is_shuffled else "random"
        does = "exceed" if is_large else "fit into"
        why = (
            f"since {_size(data.shard_bytes)} of training shards {does} the {_size(memory)} of "
            "memory"
        )
        why += (
            " but are sorted by class: prepare them again for large reads"
            if is_large and order == "random"
            else ""
        )
    if order == "random":
        return Reading(order, f"in random order, {why}")
    held = min(
        data.shard_bytes,
        window_bytes(1e6 * options["block"], options["window"], plan.data_parallel),
    )
    return Reading(order, f"in blocks, {why}; holding up to {_size(held)} of them per process")


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"


def _print_plan(args: argparse.Namespace, prepared: Prepared, task: Task) -> None:
    config, plan, data, _ = prepared
    notes = {"weights": check_init(config, args, data)}
    if data:
        notes |= {"classes": spare_classes(config, data), "reading": choose_order(prepared).why}
    elif root := named_root(config):
        why = (
            "not read, as DATA.download may write to it"
            if config["DATA"]["download"]
            else "not on this machine"
        )
        notes["data"] = f"{root} is {why}: times assume {task.train_samples:,} images"
    cluster = parse_cluster(args, DECODE[task.loader or config["DATA"]["loader"]])
    is_compared = args.gpus is not None
    print_dry_run(config, plan, data, cluster, notes, task.train_samples, is_compared=is_compared)


def _announce(name: str, prepared: Prepared, reading: str, doing: str, sides: str) -> None:
    """Print what starts, and warn of what may not be meant."""
    config, plan, data, precision = prepared
    assert data is not None
    for warning in (
        explain_cpu(config, plan.total_batch, plan.gpus),
        explain_cudnn(),
        spare_classes(config, data),
        precision.warning,
    ):
        if warning:
            print_wrapped(warning, is_warning=True)
    root = config["DATA"]["root"]
    ignored = os.environ.get("DATA")
    is_ignored = ignored and Path(ignored).expanduser().resolve() != Path(root)
    lines = [
        doing,
        f"{name}: {data.train_samples:,} training and {data.eval_samples:,} evaluation images, "
        f"{data.num_classes} classes",
        data.validation and f"validation: {data.validation}",
        sides,
        is_ignored
        and f"DATA={ignored} in the environment is not used, because the config sets "
        f"DATA.root={root}",
        f"global batch {plan.batch_formula('GPU' if torch.cuda.is_available() else 'process')}",
        f"{plan.last_step:,} of {plan.total_steps:,} steps, {plan.steps_per_epoch:,} per epoch",
        f"{config['OPTIMIZER']['name']}, learning rate {config['LEARNING_RATE']} after "
        f"{plan.warmup_steps:,} steps of "
        f"warm-up, then {config['LR_SCHEDULE']} to {config['MIN_LR']:g}",
        *(f"{key}: {effect}" for key, effect in describe_options(config, plan).items()),
        reading and f"reading {reading}",
        precision.note,
    ]
    for line in filter(None, lines):
        print_wrapped(line)


def explain_out_of_memory(error: Exception, config: Mapping[str, Any], plan: Plan) -> str:
    """Return a line with the largest MICRO_BATCH_SIZE below the plan's that the planner expects to
    fit.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return ""
    samples = plan.micro_batch * plan.accumulation
    smaller = range(plan.micro_batch - 1, 0, -1)
    fitting = Planner(config, plan, cluster_here()).predict_largest(config, samples, smaller)
    remedy = "set MODEL.activation_checkpoint=True or zero=dict(stage=1) or 3"
    if fitting and fitting.fits:
        remedy = (
            f"--set MICRO_BATCH_SIZE={fitting.micro_batch} --set "
            f"gradient_accumulation={fitting.accumulation} is "
            "expected to fit, with the same batch"
        )
    return (
        f"out of memory with micro-batches of {plan.micro_batch} images: {remedy} "
        f"({first_line(error)})"
    )


def explain_cpu(config: Mapping[str, Any], total_batch: int, processes: int) -> str:
    """Return a warning where training is slow without a GPU, with a lower bound of the time of a
    step.
    """
    if torch.cuda.is_available():
        return ""
    model = config["MODEL"]
    why = ""
    if any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        why = (
            f": torch, built for CUDA {torch.version.cuda}, cannot use the GPU: see Requirements "
            "in README.md"
        )
    seconds = total_batch / peak_images_per_s(
        model, config["fp16"], processes, torch.device("cpu"), config["FREEZE"]
    )
    if seconds < 1:
        return why and f"warning: training on the CPU{why}"
    duration = f"{seconds:.2g} s" if seconds < 100 else f"{seconds / 60:,.0f} min"
    return (
        f"warning: training on the CPU{why}; a step of {total_batch:,} images takes at least "
        f"{duration}"
    )


def explain_cudnn() -> str:
    """Return a warning about the cuDNN that is loaded on a GPU, if it is too old; else ""."""
    try:
        loaded = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    except RuntimeError as error:  # it is older than that of torch's build
        return f"warning: attention may be wrong: {first_line(error)}"
    if loaded is None or loaded >= RIGHT_CUDNN:
        return ""
    return (
        f"warning: cuDNN {loaded // 10_000}.{loaded // 100 % 100}.{loaded % 100} is loaded, which "
        "computes attention wrongly at lengths that are no multiple of 128 (fixed in 9.15.1): take "
        "its folder out of LD_LIBRARY_PATH, or set TORCH_CUDNN_SDPA_DEPRIORITIZED=1"
    )
