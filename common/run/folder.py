"""The output folder of a run: where to resume from, and what is written when training starts."""

import argparse
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.checkpoint.content import BEST, CONFIG, METRICS, RunInfo, read_about
from common.checkpoint.resume import check_changes, check_data, choose_checkpoint, finished_step
from common.errors import UserError
from common.files import lock_folder, own_file, unlock_folder
from common.metrics.curves import read_metrics
from common.run.prepare import Prepared


def find_start(output: Path, args: argparse.Namespace, prepared: Prepared) -> tuple[Path | None, str]:
    """Lock ``output``; return the checkpoint to resume from or None, and why there is nothing to train or "".

    Raises `UserError`, before changing any file, if the run cannot be resumed this way.
    """
    config, plan, data, _ = prepared
    lock_folder(output)
    folder = output / "checkpoints"
    if os.path.lexists(folder) and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(f"{folder}: not a folder that can be written; remove or rename it, or choose another --output")
    path = choose_checkpoint(args.resume, output)
    if path is not None:
        check_data(path, data, config["DATA"]["allow_change"])  # pyright: ignore[reportArgumentType]
        check_changes(path, config, output, args.allow_change, plan.last_step)
        if path.is_relative_to(output) and (step := finished_step(path, plan.last_step)) is not None:
            unlock_folder(output)
            longer = "MAX_STEPS" if plan.last_step < plan.total_steps else "NUM_EPOCHS"
            return path, (
                f"{output}: this run is finished, at step {step} with top1={last_top1(output)}; nothing "
                f"was trained. Extend it with --set {longer}=N (now {config[longer]}), or start another with "
                "--output DIR"
            )
    elif _has_finished(output):
        raise UserError(
            f"{output} holds a finished run without checkpoints, whose record would be overwritten; choose another "
            "--output, or remove it"
        )
    return path, ""


def _has_finished(output: Path) -> bool:
    """Return whether the record in ``output``, if there is one, reaches the end of its run."""
    with suppress(UserError, KeyError):
        last_step = read_about(output, RunInfo)["plan"]["last_step"]
        return any(record["kind"] == "eval" and record["step"] >= last_step for record in read_metrics(output))
    return False


def last_top1(output: Path) -> str:
    """Return the last evaluation's top-1 as text, "?" without one."""
    try:
        last = [record for record in read_metrics(output) if record["kind"] == "eval"][-1]
    except (UserError, IndexError):  # the disk was full or the folder is gone; the loggers have warned
        return "?"
    return f"{last['top1']:.4f}"


def describe_best(output: Path) -> str:
    """Return where the best evaluation is if a better one came before the last, else an empty string."""
    with suppress(UserError):  # the loggers have warned of it
        evaluations = [record for record in read_metrics(output) if record["kind"] == "eval"]
        best = max(evaluations, key=lambda record: (record["top1"], -record["loss"]), default=None)
        if best and best["step"] != evaluations[-1]["step"] and (output / "checkpoints" / BEST).exists():
            return f"top1 {best['top1']:.4f} at step {best['step']} (checkpoints/{BEST})"
    return ""


def write_start(output: Path, about: dict[str, Any], start_from: Path | None) -> None:
    """Write config.json, and metrics.jsonl up to the checkpoint ``start_from``."""
    try:
        partial = output / ".config.partial"
        own_file(partial).write_text(json.dumps(about, indent=2, default=str) + "\n")
        partial.replace(output / CONFIG)
        metrics = b"" if start_from is None else (start_from / METRICS).read_bytes()
        whole = metrics.rfind(b"\n") + 1  # a disk that was full may have taken part of the last line
        own_file(output / METRICS).write_bytes(metrics[:whole])
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror}); choose another") from error
