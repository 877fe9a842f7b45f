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
    add_start,
    check_changes,
    check_data,
    choose_checkpoint,
    finished_step,
    print_changes,
)
from common.checkpoint.save import find_best
from common.config.fields import flatten
from common.config.plan import DataSummary, Plan
from common.data.sampler import window_bytes
from common.engine.collectives import ask_first_rank
from common.engine.compiler import explain_compiler
from common.engine.groups import shutdown
from common.engine.lost_ranks import progress
from common.errors import UserError, explain_errors
from common.hardware import memory_bytes
from common.launch.detect import MPI, Launch, detect_launch, init_distributed
from common.launch.signals import stop_signals
from common.launchers import LAUNCHERS
from common.locks import lock_folder, remove_unused, unlock_folder
from common.metrics.batch_finder import BatchFinder
from common.metrics.lr_finder import LearningRateFinder
from common.metrics.measurement import Measurement
from common.metrics.profiler import ProfilerHook
from common.model.flops import peak_images_per_s
from common.planner.cluster import DECODE, Cluster, cluster_here, parse_cluster
from common.planner.dry_run import describe_options, print_dry_run
from common.planner.prediction import Planner
from common.process import at_end, set_variable
from common.provenance import describe_run, package_versions
from common.run.prepare import (
    Prepared,
    check_init,
    output_folder,
    parse_arguments,
    prepare_run,
    spare_classes,
)
from common.run.run import Run, describe_best, read_records
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
            set_variable(variables.rank, None)
    prepared = prepare_run(args, launch, task)
    is_main = launch.rank == 0
    if args.dry_run:
        if is_main:
            _print_plan(args, prepared, task)
        return None
    _handle_signals_and_errors(launch, prepared)
    init_distributed(launch, prepared.config, shared_by_ranks(args, prepared))
    output = output_folder(args, prepared.config)
    # A run that is refused leaves no empty folder.
    at_end(remove_unused, output)
    # One rank reads and locks, so that all decide alike and no two read a changing folder.
    begin = ask_first_rank(lambda: lock_and_find_start(output, args, prepared))
    if begin.finished:
        shutdown()
        if is_main:
            print_wrapped(begin.finished)
        return None
    # Memory, by which the order is chosen, may differ between hosts.
    reading = ask_first_rank(lambda: choose_order(prepared, begin.checkpoint))
    plan = replace(prepared.plan, order=reading.order)
    measurement = _build_measurement(args, output, is_main, plan)
    if measurement:
        # It starts at the first step and takes as many epochs as it needs.
        steps = measurement.total_steps
        total = max(steps, plan.total_steps)
        # At one size: losses and times of several are not comparable.
        resolution = replace(plan.resolutions[-1 if args.find_batch else 0], end=steps)
        plan = replace(
            plan, epochs=steps, last_step=steps, total_steps=total, resolutions=(resolution,)
        )
    prepared = prepared._replace(plan=plan)
    # Every rank has the record: its hooks read the config in it.
    about = _describe_start(args, argv, task, prepared)
    if is_main and begin.checkpoint:
        print_changes(about, begin.checkpoint)
    about |= ask_first_rank(lambda: add_start(about, begin.checkpoint))
    if is_main:
        sides = describe_sides(begin.checkpoint or prepared.config["INIT"], prepared.data)
        instead = measurement.announcement if measurement else ""
        _announce(args.config, prepared, reading.why, instead, sides)
    return Run(plan, output, is_main, about, begin.checkpoint, measurement)


def _handle_signals_and_errors(launch: Launch, prepared: Prepared) -> None:
    """Stop on signals from now on, and explain errors of memory and compiler."""
    at_end(explain_errors)  # forgets them
    explain_errors(
        lambda error: explain_out_of_memory(error, prepared.config, prepared.plan),
        explain_compiler,
    )
    # a launcher that is killed cannot pass a signal on
    has_parent = launch.launcher in MPI or "TORCHELASTIC_RUN_ID" in os.environ
    stop_signals.install(has_parent, progress, prepared.config["TIMEOUT"])


def _build_measurement(
    args: argparse.Namespace, output: Path, is_main: bool, plan: Plan
) -> Measurement | None:
    if args.find_lr:
        return LearningRateFinder(output, args.find_lr, is_main)
    if args.find_batch:
        return BatchFinder(output, args.find_batch, is_main, plan)
    if args.profile:
        return ProfilerHook(output, args.profile, is_main)
    return None


def _describe_start(
    args: argparse.Namespace, argv: list[str], task: Task, prepared: Prepared
) -> dict[str, Any]:
    """Return the content of config.json, but for its list of starts."""
    return {
        "name": Path(args.config).stem,
        "task": task.name,
        "config": prepared.config,
        "plan": asdict(prepared.plan),
        "init_classes": args.classes or args.class_order,
        "data": asdict(prepared.data),  # pyright: ignore[reportArgumentType]
        **describe_run(argv),
    }


def shared_by_ranks(args: argparse.Namespace, prepared: Prepared) -> dict[str, str]:
    """Return what must be the same on all ranks of a run, by name, as text.

    The data may lie elsewhere on each node, which has its own number of workers.
    """
    flags = ("world_size", "output", "resume", "allow_change", "find_lr", "find_batch", "profile")
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


@dataclass(frozen=True)
class StartPoint:
    """Where a run begins: at a checkpoint, or at step 0 without one."""

    checkpoint: Path | None = None
    finished: str = ""  # why there is nothing to train


def lock_and_find_start(output: Path, args: argparse.Namespace, prepared: Prepared) -> StartPoint:
    """Lock ``output``, and find where the run into it begins.

    The lock stays until the run ends, or is released here where there is nothing to train. Raises
    `UserError` if the run cannot be resumed this way, before it changes any file; only a checkpoint
    whose replacement was interrupted is put back.
    """
    config, plan, data, _ = prepared
    is_new = not (output / CONFIG).exists()
    # This goes before the lock, which creates the folder.
    if is_new and args.resume in (AUTO, NEVER):  # an existing run is past its INIT
        check_init(config, args, data)
    lock_folder(output)  # Another run might remove the checkpoints that are read below.
    # A measurement starts at step 0, whatever the folder holds.
    if args.measures:
        return StartPoint()
    path = choose_checkpoint(args.resume, output)
    if path is None:
        if not is_new:
            _refuse_finished_record(output)
        return StartPoint()
    check_data(path, data, args.allow_change)  # pyright: ignore[reportArgumentType]
    check_changes(path, config, output, args.allow_change)
    longer = "MAX_STEPS" if plan.last_step < plan.total_steps else "NUM_EPOCHS"
    # A branch begins at another run's checkpoint, after which that run may have ended.
    is_branch = not path.is_relative_to(output)
    patience = config["PATIENCE"]
    finished = None if is_branch else finished_step(path, plan.last_step, patience)
    if finished is not None:
        unlock_folder(output)
        limit = longer if finished >= plan.last_step else "PATIENCE"
        remedy = f"--set {limit}=N (now {config[limit]})"
        return StartPoint(path, _describe_finished(output, finished, config["BEST"], remedy))
    step = read_trainer_state(path)["trainer"]["step"]
    # a branch has to have a step of its own
    if step + is_branch > plan.last_step:
        raise UserError(
            f"{longer}={config[longer]} ends at step {plan.last_step}, {path} is at {step}: "
            "raise it"
        )
    return StartPoint(path)


def _describe_finished(output: Path, step: int, metric: str, remedy: str) -> str:
    """Return why nothing is trained in the folder of a finished run."""
    evaluations = read_records(output, "eval")
    top1 = f"{evaluations[-1]['top1']:.4f}" if evaluations else "?"
    best = find_best(output, evaluations)
    known = f", best {describe_best(best, metric)}" if best else ""
    return (
        f"{output}: this run is finished, at step {step} with top1={top1}{known}; "
        f"nothing was trained. Extend it with {remedy}, or start another with --output DIR"
    )


def _refuse_finished_record(output: Path) -> None:
    """Raise `UserError` for a run without checkpoints whose last step was evaluated."""
    last_step = read_about(output, ConfigFile)["plan"]["last_step"]
    if any(record["step"] >= last_step for record in read_records(output, "eval")):
        raise UserError(
            f"{output} holds a finished run without checkpoints, whose record would be "
            "overwritten; choose another --output, or remove it"
        )


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
class ReadingOrder:
    """The order in which the training shards are read, None without shards."""

    order: str | None = None
    why: str = ""


def choose_order(prepared: Prepared, start_from: Path | None = None) -> ReadingOrder:
    """Choose the order in which the training shards are read.

    A resumed run keeps its order on any host.
    """
    config, plan, data, _ = prepared
    if not data or not data.shard_bytes:
        return ReadingOrder()
    # Another order would show some images twice in the epoch that is resumed.
    options = config["DATA"]
    saved = read_about(start_from)["plan"]["order"] if start_from else None
    if options["sampling"]:
        reading = ReadingOrder("random", "as DATA.sampling draws single images")
    elif options["order"]:
        reading = ReadingOrder(options["order"], "set by DATA.order")
    elif saved:
        reading = ReadingOrder(saved, "as before")
    else:
        reading = _fit_order(data)
    if reading.order == "random":
        return ReadingOrder("random", f"in random order, {reading.why}")
    window = window_bytes(1e6 * options["block"], options["window"], plan.data_parallel)
    most = _size(min(data.shard_bytes, window))
    why = f"in blocks, {reading.why}; holding up to {most} of them per process"
    return ReadingOrder(reading.order, why)


def _fit_order(data: DataSummary) -> ReadingOrder:
    """Choose random order for what memory can cache, blocks for more."""
    memory = memory_bytes()
    is_large = data.shard_bytes > memory
    does = "exceed" if is_large else "fit into"
    why = f"since {_size(data.shard_bytes)} of training shards {does} the {_size(memory)} of memory"
    if is_large and data.is_shuffled:
        return ReadingOrder("blocks", why)
    if is_large:
        # a block of shards sorted by class would have few classes
        why += " but are sorted by class: prepare them again for large reads"
    return ReadingOrder("random", why)


def _size(nbytes: float) -> str:
    """Return a number of bytes in GB, or of less than a tenth in MB."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"


def _print_plan(args: argparse.Namespace, prepared: Prepared, task: Task) -> None:
    """Do what --dry-run asks for."""
    config, plan, data, _ = prepared
    notes = {"weights": check_init(config, args, data)}
    if data:
        notes |= {"classes": spare_classes(config, data), "reading": choose_order(prepared).why}
    elif named_root(config):
        why = "not on this machine"
        if config["DATA"]["download"]:
            why = "not read, as DATA.download may write to it"
        notes["data"] = f"{named_root(config)} is {why}: times assume {task.train_samples:,} images"
    cluster = parse_cluster(args, DECODE[task.loader or config["DATA"]["loader"]])
    is_compared = args.gpus is not None
    print_dry_run(config, plan, data, cluster, notes, task.train_samples, is_compared=is_compared)


def _announce(name: str, prepared: Prepared, reading: str, instead: str, sides: str) -> None:
    """Print what starts, and warn of what may not be meant."""
    config, plan, data, precision = prepared
    assert data is not None
    for warning in (
        explain_cpu(config, plan.total_batch, plan.gpus),
        explain_cudnn(),
        torch.cuda.is_available() and explain_sizes(config, plan, cluster_here()),
        spare_classes(config, data),
        precision.warning,
    ):
        if warning:
            print_wrapped(warning, is_warning=True)
    root = config["DATA"]["root"]
    ignored = os.environ.get("DATA")
    is_ignored = ignored and Path(os.path.expanduser(ignored)).resolve() != Path(root)
    schedule = f"{plan.warmup_steps:,} steps of warm-up, then {config['LR_SCHEDULE']}"
    lines = [
        instead,
        f"{name}: {data.train_samples:,} training and {data.eval_samples:,} evaluation images, "
        f"{data.num_classes} classes",
        data.validation and f"validation: {data.validation}",
        sides,
        is_ignored
        and f"DATA={ignored} in the environment is not used, because the config sets "
        f"DATA.root={root}",
        f"global batch {plan.batch_formula('GPU' if torch.cuda.is_available() else 'process')}",
        f"{plan.last_step:,} of {plan.total_steps:,} steps, {plan.steps_per_epoch:,} per epoch",
        f"{config['OPTIMIZER']['name']}, learning rate {config['LEARNING_RATE']} after {schedule} "
        f"to {config['MIN_LR']:g}",
        *(f"{key}: {effect}" for key, effect in describe_options(config, plan, data).items()),
        reading and f"reading {reading}",
        precision.note,
    ]
    for line in filter(None, lines):
        print_wrapped(line)


def explain_out_of_memory(error: Exception, config: Mapping[str, Any], plan: Plan) -> str:
    """Return a line with the largest smaller MICRO_BATCH_SIZE that the planner expects to fit."""
    if not isinstance(error, torch.OutOfMemoryError):
        return ""
    samples = plan.micro_batch * plan.accumulation
    # The global batch stays, cut into more micro-batches.
    smaller = range(plan.micro_batch - 1, 0, -1)
    fitting = Planner(config, plan, cluster_here()).predict_largest(config, samples, smaller)
    remedy = "set MODEL.activation_checkpoint=True or zero=dict(stage=1) or 3"
    # It is the last size tried where none fits.
    if fitting and fitting.fits:
        remedy = (
            f"--set MICRO_BATCH_SIZE={fitting.micro_batch} --set "
            f"gradient_accumulation={fitting.accumulation} is expected to fit, with the same batch"
        )
    if any(each.micro_batch > plan.micro_batch for each in plan.resolutions):
        remedy = f"lower those in IMAGE_SIZES; or {remedy}"
    return (
        f"out of memory with micro-batches of {plan.micro_batch} images: {remedy} "
        f"({first_line(error)})"
    )


def explain_cpu(config: Mapping[str, Any], total_batch: int, processes: int) -> str:
    """Return a warning where training is slow without a GPU, with the least time of a step."""
    if torch.cuda.is_available():
        return ""
    model = config["MODEL"]
    why = ""
    # With an empty CUDA_VISIBLE_DEVICES the user has asked for the CPU.
    if any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        why = (
            f": torch, built for CUDA {torch.version.cuda}, cannot use the GPU: see Requirements "
            "in README.md"
        )
    seconds = total_batch / peak_images_per_s(
        model, config["fp16"], processes, torch.device("cpu"), config["FREEZE"]
    )
    # A step that is quick even here needs no warning.
    if seconds < 1:
        return why and f"warning: training on the CPU{why}"
    return (
        f"warning: training on the CPU{why}; a step of {total_batch:,} images takes at least "
        f"{seconds:,.0f} s"
    )


def explain_sizes(config: Mapping[str, Any], plan: Plan, cluster: Cluster) -> str:
    """Return a warning of the first size of IMAGE_SIZES that is not expected to fit; else "".

    Its error would come when its epochs begin, perhaps after hours.
    """
    if not config["IMAGE_SIZES"]:
        return ""
    planner = Planner(config, plan, cluster)
    begin = 0
    for each in plan.resolutions:
        step = each.micro_batch, each.accumulation, each.image_size
        prediction = planner.predict(config, *step)
        if not prediction.fits:
            need = _size(prediction.estimate.peak)
            return (
                f"warning: from epoch {begin + 1} on, {each.micro_batch} images of "
                f"{each.image_size} pixels are expected to take {need}, too much for a GPU with "
                f"{_size(cluster.memory)}: lower MICRO_BATCH_SIZE, or what IMAGE_SIZES has"
            )
        begin = each.end
    return ""


def explain_cudnn() -> str:
    """Return a warning about the cuDNN that is loaded on a GPU, if it is too old; else ""."""
    try:
        loaded = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    except RuntimeError as error:
        # It is older than that of torch's build.
        return f"warning: attention may be wrong: {first_line(error)}"
    if loaded is None or loaded >= RIGHT_CUDNN:
        return ""
    return (
        f"warning: cuDNN {loaded // 10_000}.{loaded // 100 % 100}.{loaded % 100} is loaded, which "
        "computes attention wrongly at lengths that are no multiple of 128 (fixed in 9.15.1): take "
        "its folder out of LD_LIBRARY_PATH, or set TORCH_CUDNN_SDPA_DEPRIORITIZED=1"
    )
