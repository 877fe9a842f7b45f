"""Which checkpoint a run resumes from, and which keys of the config may have changed since."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.checkpoint.content import (
    CONFIG,
    TRAINER,
    find_fault,
    read_config,
    read_metadata,
    read_trainer_state,
    show_changes,
)
from common.checkpoint.save import list_checkpoints, put_back_old
from common.config.fields import flatten
from common.config.plan import DataSummary
from common.errors import UserError
from common.files import Values
from common.metrics.loggers import warn
from common.model.build import build_on_meta, state_shapes

NEVER, AUTO = "never", "auto"
# The position in the data and the optimizer's state depend on these, and a checkpoint replaces the
# weights of INIT.
FIXED = (
    "TOTAL_BATCH_SIZE",
    "BATCH_SIZES",
    "SMALLEST_BATCH",
    "SEED",
    "OPTIMIZER.name",
    "INIT",
)
# These say where, how fast and how often: they may change at every start. Global batches and crops
# stay the same; what is drawn per micro-batch (dropout, Mixup, CutMix, the noise of
# ERASING_MODE="pixel") changes with how they are cut.
HARMLESS = (
    "BATCH_SIZE",
    "BEST",
    "CHECKPOINT_EVERY",
    "COMPILE",
    "DATA.download",
    "DATA.loader",
    "DATA.root",
    "DATA.workers",
    "EVAL_EVERY",
    "GPUS",
    "GRAPHS",
    "KEEP",
    "LOG",
    "MAX_REPLAY_FAULTS",
    "MAX_SKIPPED",
    "MAX_STEPS",
    "MICRO_BATCH_SIZE",
    "MODEL.activation_checkpoint",
    "OUTPUT",
    "PATIENCE",
    "REPLAY_EVERY",
    "TENSOR_PARALLEL_MODE",
    "TENSOR_PARALLEL_SIZE",
    "TIMEOUT",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "gradient_accumulation",
    "parallel",
    "torch_ddp",
    "zero",
)
# config.json records changes of these, and a report shows them. Changes of the others are only
# printed.
REPORTED = {"parallel", "zero"}
NOTES = {  # on what follows where a key has changed
    "NUM_EPOCHS": "; the learning rate follows the new schedule",
    "BEST": "; the best starts anew",
}


def choose_checkpoint(resume: str, output: Path) -> Path | None:
    """Return the checkpoint that ``--resume`` names for a run into ``output``, or None.

    Every byte of it is checked.

    "auto" means the newest intact one of ``output``; "never" refuses a folder that holds a run; all
    else is the path of a checkpoint, or of a run whose newest intact one is meant. Where ``output``
    is a branch of that already, it is resumed from its own.
    """
    holds_run = (output / CONFIG).exists()
    if resume == NEVER:
        if holds_run:
            raise UserError(
                f"--output {output} holds another run: choose another folder, or leave out "
                "--resume never"
            )
        return None
    if resume == AUTO:
        return _newest_intact(output / "checkpoints")
    path = Path(resume).resolve()
    if holds_run and _is_branch(output, path):
        return _newest_intact(output / "checkpoints") or _find(path)
    checkpoint = _find(path)
    if holds_run and not path.is_relative_to(output):
        raise UserError(
            f"--output {output} holds another run than --resume {path}: choose another folder"
        )
    for later in list_checkpoints(output / "checkpoints"):
        # a rerun without --resume would continue the training that is left here
        if later.name > checkpoint.name and not find_fault(later):
            raise UserError(
                f"--resume {path}: the run in {output} has continued to {later.name}; omit "
                "--resume to resume from there, remove the later checkpoints to go back, or "
                "branch off with --output DIR"
            )
    return checkpoint


def _is_branch(output: Path, path: Path) -> bool:
    """Return whether the run in ``output`` branched off from ``path``, a checkpoint or a run."""
    origins = [
        Path(start["from"]) for start in read_metadata(output)["starts"] if start.get("from")
    ]
    # A branch that was resumed later has its own checkpoints among them.
    elsewhere = [origin for origin in origins if not origin.is_relative_to(output)]
    # The last one: a branch of a branch has the origins of both.
    return bool(elsewhere) and elsewhere[-1].is_relative_to(path)


def _find(path: Path) -> Path:
    """Return the checkpoint ``path``, or the newest intact one of the run ``path``."""
    if (path / TRAINER).exists():
        fault = find_fault(path)
        if fault:
            raise UserError(
                f"--resume {path}: this checkpoint cannot be resumed, {fault}; choose another"
            )
        return path
    newest = _newest_intact(path / "checkpoints")
    if newest is None:
        raise UserError(
            f"--resume {path}: neither a checkpoint nor a run with one; give the path of one of "
            f"these, or {NEVER}"
        )
    return newest


def _newest_intact(folder: Path) -> Path | None:
    """Return the newest checkpoint in ``folder`` without a fault; warn of those it skips."""
    put_back_old(folder)  # A crash may have interrupted the replacement of one.
    checkpoints = list_checkpoints(folder)
    for path in checkpoints:
        fault = find_fault(path)
        if fault is None:
            return path
        warn(f"{path} cannot be resumed ({fault}) and is skipped")
    # Starting at step 0 would write over what may still be rescued.
    if checkpoints:
        raise UserError(
            f"{folder}: none of the {len(checkpoints)} checkpoints can be resumed; start again in "
            "another folder"
        )
    return None


def print_changes(metadata: Values, start_from: Path, output: Path) -> None:
    """Print which checkpoint is resumed, and what has changed since its run last started.

    From another folder's, the run into ``output`` is a branch.
    """
    branch = "" if start_from.is_relative_to(output) else f": {output} is a branch"
    print(f"resuming from {start_from}{branch}")
    changed = changed_keys(start_from, metadata["config"])
    for key, (then, value) in changed.items():
        print(f"{key}={value!r} from here on (was {then!r}){NOTES.get(key, '')}")
    now = metadata["plan"]["dtype"]
    dtype = read_metadata(start_from)["starts"][-1].get("dtype")
    if dtype != now:
        print(f"computing in {now} from here on (was {dtype})")


def add_start(metadata: Values, start_from: Path | None) -> dict[str, Any]:
    """Return config.json's ``starts`` with this start added, and ``config`` with the first INIT."""
    plan = metadata["plan"]
    now: dict[str, Any] = {"step": 0, "gpus": plan["gpus"], "dtype": plan["dtype"]}
    now |= {key: metadata[key] for key in ("started", "argv", "commit")}
    if start_from is None:
        return {"starts": [now]}
    now |= {"step": read_trainer_state(start_from)["trainer"]["step"], "from": str(start_from)}
    before = read_metadata(start_from)
    changed = changed_keys(start_from, metadata["config"])
    unreported = [key for key in HARMLESS if key not in REPORTED]
    now["changed"] = {key: pair for key, pair in changed.items() if not _is_under(key, unreported)}
    if before["plan"]["gpus"] != plan["gpus"]:
        now["changed"]["processes"] = before["plan"]["gpus"], plan["gpus"]
    config = dict(metadata["config"], INIT=before["config"]["INIT"])
    return {"starts": [*before["starts"], now], "config": config}


def finished_step(path: Path, last_step: int, patience: int | None) -> int | None:
    """Return the step of checkpoint ``path`` if it ends a run, or None.

    A run ends after ``last_step`` steps, or ``patience`` evaluations without a new best.
    """
    state = read_trainer_state(path)
    step = state["trainer"]["step"]
    is_over = step >= last_step or state["stale"] >= (patience or math.inf)
    return step if is_over and state["trainer"]["evaluated_step"] == step else None


def check_data(path: Path, data: DataSummary, allowed: Sequence[str]) -> None:
    """Raise `UserError` if ``path`` is of another data set, unless DATA.root is ``allowed``."""
    then = read_metadata(path)["data"]
    if then["fingerprint"] == data.fingerprint:
        return
    counts = f"{then['train_samples']:,} training images then, {data.train_samples:,} now"
    if not _is_under("DATA.root", allowed):
        raise UserError(
            f"DATA.root differs from the data set of checkpoint {path} ({counts}): point DATA.root "
            "to the original, or add --allow-change DATA.root"
        )
    print(f"DATA.root is another data set from here on ({counts}); the best starts anew")


def check_changes(path: Path, config: Values, output: Path, allowed: Sequence[str]) -> None:
    """Raise `UserError` where ``config`` trains differently from the run of checkpoint ``path``.

    In another folder than that run's, a branch, only `FIXED` keys are refused; else also those that
    are neither `HARMLESS` nor in ``allowed``.
    """
    changed = changed_keys(path, config)
    fixed: list[str] = [*FIXED]
    model = read_config(path, read_metadata(path))["MODEL"]
    # By shapes: MODEL.dropout may change, MODEL.depth may not.
    if state_shapes(build_on_meta(model)) != state_shapes(build_on_meta(config["MODEL"])):
        fixed.append("MODEL")
    refused = {key: pair for key, pair in changed.items() if _is_under(key, fixed)}
    if refused:
        raise UserError(
            f"{show_changes(refused)}: {path} cannot be resumed with other values; keep the "
            "earlier ones, or start another run with --output DIR (--init takes the weights that "
            "fit)"
        )
    # A branch is a run of its own, which may train differently.
    if not path.is_relative_to(output):
        return
    then, now = changed.get("NUM_EPOCHS", (0, 0))
    accepted = [*HARMLESS, *allowed]
    if now > then:  # some recipes derive the warm-up from the number of epochs
        accepted += ["NUM_EPOCHS", "WARMUP_EPOCHS"]
    refused = {key: pair for key, pair in changed.items() if not _is_under(key, accepted)}
    if refused:
        allow = " ".join(f"--allow-change {key}" for key in refused)
        raise UserError(
            f"{show_changes(refused)}: the run in {output} has trained with the earlier values; "
            "keep them, start another run with --output DIR, branch off with "
            f"--resume {path} --output DIR, or add {allow}"
        )


def _is_under(key: str, names: Sequence[str]) -> bool:
    """Return whether ``key`` is one of ``names``, or a key in one of these sections."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def changed_keys(path: Path, config: Values) -> dict[str, tuple[Any, Any]]:
    """Return ``{key: (then, now)}`` for the keys that differ from those of checkpoint ``path``."""
    metadata = read_metadata(path)
    saved = read_config(path, metadata)  # newer keys at their defaults
    order = metadata["plan"]["order"]  # a folder has none
    saved["DATA"]["order"] = order or saved["DATA"]["order"]
    # JSON has lists for tuples, and text for AMP_TYPE: both sides are compared in that form.
    then, now = (flatten(json.loads(json.dumps(values, default=str))) for values in (saved, config))
    pairs = {key: (then.get(key), now.get(key)) for key in then | now}
    # None leaves each of these as the earlier start settled it.
    as_before = [key for key in ("INIT", "DATA.order", "DATA.split") if now[key] is None]
    return {
        key: (was, value)
        for key, (was, value) in pairs.items()
        if was != value and key not in as_before
    }
