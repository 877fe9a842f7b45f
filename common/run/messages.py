"""What a run prints when it starts, and ``--dry-run``."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from common.checkpoint.content import read_config, read_metadata, read_trainer_state
from common.config.plan import Plan, describe_rate, rate_factor
from common.errors import UserError
from common.files import Values
from common.optim.schedules import build_factor
from common.planner.cluster import DECODE, cluster_here, parse_cluster
from common.planner.dry_run import describe_options, print_dry_run
from common.resolutions import schedule_step
from common.run.checks import Prepared, check_init
from common.run.reading_order import choose_order
from common.run.start_warnings import (
    explain_cpu,
    explain_cudnn,
    explain_muon,
    explain_sizes,
    explain_unused_classes,
)
from common.task import Task, ignored_root, named_root
from common.text import print_wrapped


def print_plan(args: Namespace, prepared: Prepared, task: Task) -> None:
    """Do what --dry-run asks for."""
    config, data = prepared.config, prepared.data
    root = named_root(config["DATA"])
    notes = {"weights": check_init(args, prepared)}
    if data:
        notes |= {
            "classes": explain_unused_classes(prepared),
            "reading": choose_order(prepared).why,
        }
    elif root:
        why = "not on this machine"
        if config["DATA"]["download"]:
            why = "not read, as DATA.download may write to it"
        notes["data"] = f"{root} is {why}: times assume {task.train_samples:,} images"
    cluster = parse_cluster(args, DECODE[task.loader or config["DATA"]["loader"]])
    print_dry_run(
        config,
        prepared.plan,
        data,
        cluster,
        notes,
        task.train_samples,
        is_compared=args.gpus is not None,
    )


def announce(
    name: str,
    prepared: Prepared,
    start_from: Path | None,
    reading: str,
    instead: str,
    rate: str,
) -> None:
    """Print what starts, and warn of what may not be meant.

    ``start_from``: the checkpoint to resume from. ``instead``: what runs instead of training.
    ``rate``: a warning of it.
    """
    config, plan, data, precision = prepared
    assert data is not None
    for warning in (
        explain_cpu(config, plan.total_batch, plan.world_size),
        explain_cudnn(),
        torch.cuda.is_available() and explain_sizes(config, plan, cluster_here()),
        explain_unused_classes(prepared),
        "" if start_from else explain_muon(config),
        rate,
        precision.warning,
    ):
        if warning:
            print_wrapped(warning, is_warning=True)
    root = config["DATA"]["root"]
    ignored = ignored_root(root)
    lines = [
        instead,
        f"{name}: {data.train_samples:,} training and {data.eval_samples:,} evaluation images, "
        f"{data.num_classes} classes",
        data.validation and f"validation: {data.validation}",
        explain_leakage(start_from or config["INIT"], data),
        ignored
        and f"DATA={ignored} in the environment is not used, because the config sets "
        f"DATA.root={root}",
        f"global batch {plan.batch_formula('GPU' if torch.cuda.is_available() else 'process')}",
        _describe_steps(plan, start_from),
        f"{config['OPTIMIZER']['name']}, learning rate {describe_rate(config, plan)}",
        start_from and describe_rate_change(start_from, config, plan),
        *(f"{key}: {effect}" for key, effect in describe_options(config, plan, data).items()),
        reading and f"reading {reading}",
        precision.note,
    ]
    for line in filter(None, lines):
        print_wrapped(line)


def _describe_steps(plan: Plan, start_from: Path | None) -> str:
    total = plan.count_steps(plan.total_steps)
    batches = "of several batches" if plan.has_batches else f"{plan.steps_per_epoch:,} per epoch"
    text = f"{total:,} steps, {batches}"
    if plan.last_step < total:
        text += f"; ends after {plan.last_step:,}"
    if start_from:
        done = read_trainer_state(start_from)["trainer"]["step"]
        text += f"; {plan.last_step - done:,} are left"
    return text


def describe_rate_change(start_from: Path, config: Values, plan: Plan) -> str:
    """Return what a changed schedule does to the rate at the checkpoint ``start_from``, else ""."""
    metadata = read_metadata(start_from)
    before = _schedule_of(read_config(start_from, metadata), Plan.from_dict(metadata["plan"]))
    now = _schedule_of(config, plan)
    if before == now:
        return ""
    trained = read_trainer_state(start_from)["trainer"]
    step = trained["step"]
    position: float = step
    if plan.has_batches:
        position = schedule_step(plan.resolutions, step)
    factor = rate_factor(config, plan, trained["epoch"])
    rates = [f"{factor * each[0] * build_factor(*each)(position):.3g}" for each in (before, now)]
    earlier = "as" if rates[0] == rates[1] else rates[0]
    return f"learning rate at step {step:,}: {rates[1]}, {earlier} by the earlier schedule"


def _schedule_of(config: Values, plan: Plan) -> tuple[Any, ...]:
    """Return the arguments of `build_factor`."""
    steps = plan.total_steps, plan.warmup_steps, plan.cooldown_steps
    peak, name, *limits = (
        config[key] for key in ("LEARNING_RATE", "LR_SCHEDULE", "MIN_LR", "WARMUP_LR")
    )
    return peak, name, *steps, *limits, plan.decay_steps


def explain_leakage(source: Any, now: Any) -> str:
    """Return what is known of validation images that the run or checkpoint ``source`` trained on.

    "" for the same data set, one of other classes, and one with its own validation images. A run's
    record has no names of images, but the rule by which they were held out.
    """
    try:
        then = read_metadata(Path(source))["data"]
    except (UserError, TypeError):  # weights from elsewhere, or none
        return ""
    is_same = then["fingerprint"] == now.fingerprint
    if is_same or not now.held_out or {*then["class_names"]}.isdisjoint(now.class_names):
        return ""
    if "name" in now.held_out and now.held_out == then.get("held_out"):
        return (
            f"held out: {now.held_out}, as in {source}: images keep their sides, but one in each "
            "class of a few may have moved"
        )
    return (
        f"warning: {source} may have been trained on up to {now.eval_samples:,} of the "
        f"{now.eval_samples:,} validation images, which it held out in another way"
    )
