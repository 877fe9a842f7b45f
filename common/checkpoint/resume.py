"""Which checkpoint a run goes on from, and whether it may."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from common.checkpoint.save import (
    CONFIG,
    TRAINER,
    find_fault,
    list_checkpoints,
    load_trainer_state,
    put_back_old,
)
from common.colossal import ParallelMode, gpc
from common.config.batch_plan import DataSummary
from common.errors import AgreedError, UserError
from common.table import flatten

NEVER, AUTO = "never", "auto"
# What the position in the data and the optimiser's state depend on; all else may change between two starts.
FIXED = ("TOTAL_BATCH_SIZE", "SEED", "OPTIMIZER.name")
Answer = TypeVar("Answer")


def ask_first_rank(question: Callable[[], Answer]) -> Answer:
    """Return rank 0's answer to ``question()`` on all ranks; if that raises `UserError`, all raise `AgreedError`."""
    answer: list[Any] = [None, None]
    if gpc.get_global_rank() == 0:
        try:
            answer[0] = question()
        except UserError as error:
            answer[1] = str(error)
    if gpc.get_world_size(ParallelMode.GLOBAL) > 1:
        dist.broadcast_object_list(answer, src=0, group=gpc.get_cpu_group(ParallelMode.GLOBAL))
    if answer[1] is not None:
        raise AgreedError(answer[1])
    return answer[0]


def choose_checkpoint(resume: str, output: Path) -> Path | None:
    """Return the checkpoint that ``--resume`` means for a run into ``output``, checked to the last byte; None: none.

    "auto" means the newest intact one of ``output``; "never" refuses a folder that holds a run; all else is the path of
    a checkpoint, or of a run whose newest intact one is meant.
    """
    holds_run = (output / CONFIG).exists()
    if resume == NEVER:
        if holds_run:
            raise UserError(
                f"--output {output} holds another run: choose another folder, or go on without --resume never"
            )
        return None
    if resume == AUTO:
        return _newest_intact(output / "checkpoints")
    return _find(Path(resume).resolve(), output, holds_run)


def _find(path: Path, output: Path, holds_run: bool) -> Path:
    if holds_run and not path.is_relative_to(output):
        raise UserError(f"--output {output} holds another run than --resume {path}: choose another folder")
    if (path / TRAINER).exists():
        if fault := find_fault(path):
            raise UserError(f"--resume {path}: the checkpoint is damaged, {fault}; choose another")
        return path
    found = _newest_intact(path / "checkpoints") if path.is_dir() else None
    if found is None:
        raise UserError(f"--resume {path}: neither a checkpoint nor a run with one; write never, or the path of one")
    return found


def _newest_intact(folder: Path) -> Path | None:
    put_back_old(folder)
    checkpoints = list_checkpoints(folder)
    for path in checkpoints:
        if (fault := find_fault(path)) is None:
            return path
        print(f"warning: {path} is damaged ({fault}) and is left out", file=sys.stderr, flush=True)
    if checkpoints:
        raise UserError(
            f"{folder}: none of the {len(checkpoints)} checkpoints is intact; start again in another folder"
        )
    return None


def note_start(about: Mapping[str, Any], data: DataSummary, start_from: Path | None) -> list[dict[str, Any]]:
    """Return when, how and from which step the run was started, each time; say what has changed since the last one."""
    plan = about["plan"]
    now = {"step": 0} | {key: about[key] for key in ("started", "argv", "commit")}
    now |= {"gpus": plan["gpus"], "dtype": plan["dtype"]}
    if start_from is None:
        return [now]
    now["step"] = load_trainer_state(start_from)["trainer"]["step"]
    check_data(start_from, data, about["config"]["DATA"]["allow_change"])
    print(f"going on from {start_from}")
    for key, (then, value) in compare_configs(start_from, about["config"]).items():
        print(f"{key}={value!r} from here on; it was {then!r}")
    starts = json.loads((start_from / CONFIG).read_text())["starts"]
    before = starts[-1].get("dtype", now["dtype"])  # older runs have not recorded it
    if before != now["dtype"]:
        print(f"computing in {now['dtype']} from here on; it was {before}")
    return [*starts, now]


def check_data(path: Path, data: DataSummary, allow_change: bool) -> None:
    """Raise `UserError` if the checkpoint ``path`` is of another data set than ``data`` is, or was before repairs."""
    then = json.loads((path / CONFIG).read_text())["data"]
    if then["fingerprint"] in (data.fingerprint, *data.earlier):
        return
    counts = f"{then['train_samples']:,} training images then, {data.train_samples:,} now"
    if not allow_change:
        raise UserError(
            f"DATA.root is another data set than the one of {path} ({counts}): name that one, or go on with this by "
            "--set DATA.allow_change=True"
        )
    print(f"DATA.root is another data set from here on ({counts})")


def compare_configs(path: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return ``{key: (then, now)}`` for the keys that differ from those of the checkpoint ``path``.

    Raises `UserError` where one of `FIXED` has changed.
    """
    then, now = (
        flatten(json.loads((path / CONFIG).read_text())["config"]),
        flatten(json.loads(json.dumps(config, default=str))),
    )
    changed = {key: (then.get(key), now.get(key)) for key in then | now if then.get(key) != now.get(key)}
    for key in FIXED:
        if key in changed:
            before, after = changed[key]
            raise UserError(f"{key}={after!r}: {path} was made with {before!r}; keep that, or choose another --output")
    return changed
