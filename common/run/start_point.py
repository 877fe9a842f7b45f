"""Where a run begins: at step 0, at a checkpoint, or not at all."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from common.checkpoint.content import CONFIG, ConfigFile, read_metadata, read_trainer_state
from common.checkpoint.resume import (
    AUTO,
    NEVER,
    check_changes,
    check_data,
    choose_checkpoint,
    finished_step,
)
from common.checkpoint.save import checkpoint_path, find_best, list_checkpoints
from common.config.plan import BatchCut, Plan
from common.errors import UserError
from common.locks import lock_folder, unlock_folder
from common.run.checks import Prepared, check_init
from common.run.replay import find_replay_start
from common.run.run import describe_best, read_records
from common.text import list_some

# What a run has trained with before its decay does not depend on these.
STABLE_KEYS = ("NUM_EPOCHS", "DECAY", "LR_SCHEDULE")


class StartPoint(NamedTuple):
    """Where a run begins: at a checkpoint, or at step 0 without one."""

    plan: Plan
    checkpoint: Path | None = None
    finished: str = ""  # why there is nothing to train


def lock_and_find_start(output: Path, args: Namespace, prepared: Prepared) -> StartPoint:
    """Lock ``output``, and find where the run into it begins.

    The lock stays until the run ends, or is released here where there is nothing to train. Raises
    `UserError` if the run cannot be resumed this way, before it changes any file; only a checkpoint
    whose replacement was interrupted is put back.
    """
    config, plan = prepared.config, prepared.plan
    if args.replay:
        origin = find_replay_start(output, args.replay, args.resume)
        # Not locked: the run may go on meanwhile.
        check_data(origin or output, prepared.data, args.allow_change)  # pyright: ignore[reportArgumentType]
        check_changes(origin or output, config, output, args.allow_change)
        return StartPoint(_continue_plan(origin, prepared), origin)
    is_new = not (output / CONFIG).exists()
    # This goes before the lock, which creates the folder.
    if is_new and args.resume in (AUTO, NEVER):  # an existing run is past its INIT
        check_init(args, prepared)
    lock_folder(output)  # Another run might remove the checkpoints that are read below.
    # A measurement starts at step 0, whatever the folder holds.
    if args.measures:
        return StartPoint(plan)
    path = choose_checkpoint(args.resume, output)
    if path is None:
        if not is_new:
            _refuse_finished_record(output)
        return StartPoint(plan)
    plan = _continue_plan(path, prepared)
    check_data(path, prepared.data, args.allow_change)  # pyright: ignore[reportArgumentType]
    longer = "MAX_STEPS" if plan.last_step < plan.count_steps(plan.total_steps) else "NUM_EPOCHS"
    # A branch begins at another run's checkpoint, after which that run may have ended.
    is_branch = not path.is_relative_to(output)
    allowed = [*args.allow_change]
    if is_stable(path, plan, is_branch=is_branch and "NUM_EPOCHS" not in allowed):
        allowed += STABLE_KEYS
    check_changes(path, config, output, allowed)
    patience = config["PATIENCE"]
    finished = None if is_branch else finished_step(path, plan.last_step, patience)
    if finished is not None:
        unlock_folder(output)
        limit = longer if finished >= plan.last_step else "PATIENCE"
        remedy = f"--set {limit}=N (now {config[limit]})"
        return StartPoint(plan, path, _describe_finished(output, finished, config["BEST"], remedy))
    step = read_trainer_state(path)["trainer"]["step"]
    # a branch has to have a step of its own
    if step + is_branch > plan.last_step:
        raise UserError(
            f"{longer}={config[longer]} ends at step {plan.last_step}, {path} is at {step}: "
            "raise it"
        )
    return StartPoint(plan, path)


def _continue_plan(path: Path | None, prepared: Prepared) -> Plan:
    """Return the plan, with the batches that BATCH_SIZES="noise" had up to a checkpoint."""
    config, plan = prepared.config, prepared.plan
    if path is None or config["BATCH_SIZES"] != "noise":
        return plan
    then = Plan.from_dict(read_metadata(path)["plan"])
    batches = [(each.end, each.total_batch) for each in then.resolutions]
    batches[-1] = config["NUM_EPOCHS"], batches[-1][1]
    train_samples = prepared.data.train_samples  # pyright: ignore[reportOptionalMemberAccess]
    resolutions = BatchCut.of_plan(config, plan, train_samples).resolutions(batches)
    return replace(plan, resolutions=resolutions).with_steps(config["MAX_STEPS"])


def is_stable(path: Path, plan: Plan, *, is_branch: bool) -> bool:
    """Return whether no step up to the checkpoint ``path`` was, or is by ``plan``, in the decay.

    False for schedules without a stable phase. Raises `UserError` for a branch from a later
    checkpoint into another decay, where the rate would jump.
    """
    then = Plan.from_dict(read_metadata(path)["plan"])
    if not (then.decay_steps and plan.decay_steps):
        return False
    before, now = ((each.count_steps(each.decay_start), each.decay_steps) for each in (then, plan))
    end = min(before, now)[0]
    step = read_trainer_state(path)["trainer"]["step"]
    if step <= end:
        return True
    if is_branch and before != now:
        last = checkpoint_path(path.parent, end).name
        good = [each.name for each in list_checkpoints(path.parent) if each.name <= last]
        raise UserError(
            f"--resume {path}: step {step:,} is in the decay, which begins at step {before[0]:,} "
            f"in that run and {now[0]:,} with NUM_EPOCHS={plan.epochs}; branch off from "
            f"{list_some(good) or 'one saved before (none is left)'}, or add --allow-change "
            "NUM_EPOCHS"
        )
    return False


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
    last_step = read_metadata(output, ConfigFile)["plan"]["last_step"]
    if any(record["step"] >= last_step for record in read_records(output, "eval")):
        raise UserError(
            f"{output} holds a finished run without checkpoints, whose record would be "
            "overwritten; choose another --output, or remove it"
        )
