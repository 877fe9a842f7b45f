"""Run a piece of the campaign in a process of its own, which writes down each row as soon as it is there."""

import hashlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from campaign.job import ROOT, Job, NotRunError, Row, UnfinishedError
from common.metrics.provenance import describe_run

OURS = {"caltech101_amp", "campaign", "cifar10_benchmark", "common", "configs", "imagenet_dali"}
# How a piece ends; the record's "why" says more of all but the first.
COMPLETE, NOT_RUN, UNFINISHED, FAILED, RUNNING = "complete", "not run", "unfinished", "failed", "running"
Record = dict[str, Any]


def describe(argv: list[str]) -> Record:
    """Return what every record holds: command, commit, checksum of the code, versions and hardware."""
    about = describe_run(argv)
    about["code"] = code_checksum()
    about["versions"]["cuda"] = torch.version.cuda
    about["hardware"]["driver"] = _driver()
    return about


def code_checksum() -> str:
    """Return a checksum of the project's Python files: of a copy without git, and of changes without a commit, too."""
    digest = hashlib.sha256()
    for folder in sorted(OURS - {"campaign"} | {"scripts"}):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.endswith("_test.py"):
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.partition("\n")[0] or None


def is_done(record: Record | None, about: Record, tiny: bool) -> bool:
    """Return whether the piece of ``record`` ran to its end with this code, on this hardware, with these versions."""
    if record is None or record["status"] != COMPLETE or record["tiny"] != tiny:
        return False
    then, now = (
        {name: value for name, value in each["hardware"].items() if name != "host"} for each in (record, about)
    )
    return (record["code"], record["versions"], then) == (about["code"], about["versions"], now)


def read_record(path: Path) -> Record | None:
    return json.loads(path.read_text()) if path.exists() else None


def write_record(path: Path, record: Record) -> None:
    """Write the record whole or not at all; that of a piece that was not run never takes the place of figures."""
    before = read_record(path)
    if before and before["rows"] and not record["rows"] and record["status"] == NOT_RUN:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1, default=str) + "\n")
    partial.replace(path)


def run_piece(module: str, name: str, job: Job, path: Path, about: Record) -> Record:
    """Run ``campaign.<module>.<name>`` on ``job`` in a process of its own; return its record, which is in ``path`` too.

    The process and those that it starts are ended after ``job.seconds``, and when this one ends.
    """
    record = {"piece": name, "tiny": job.tiny, "status": RUNNING, "why": None, "shows": None, "rows": [], **about}
    if not (job.tiny or job.on_gpu):
        record |= {"status": NOT_RUN, "why": "no GPU", "seconds": 0.0}
        write_record(path, record)
        return record
    running = path.with_suffix(".running")
    left = read_record(running) or read_record(path)
    if not (left and left["code"] == about["code"] and left["status"] in (RUNNING, UNFINISHED)):
        shutil.rmtree(job.folder, ignore_errors=True)
    job = replace(job, started=time.monotonic())
    job.folder.mkdir(parents=True, exist_ok=True)
    write_record(running, record)
    # importing anew takes seconds, but a forked process cannot use a GPU
    context = multiprocessing.get_context("spawn" if job.on_gpu else "fork")
    process = context.Process(target=_run, args=(module, name, job, running, record))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork() with threads around
        process.start()
    try:
        process.join(job.seconds)
        is_over = process.is_alive()
    finally:
        with suppress(ProcessLookupError):  # nothing is left of its group, or it has had no time to make one
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    record = _read_end(running, process.exitcode, f"killed after its limit of {job.seconds:.0f} s" if is_over else None)
    record["seconds"] = round(time.monotonic() - job.started, 3)
    write_record(path, record)
    running.unlink()
    if record["status"] != UNFINISHED:
        shutil.rmtree(job.folder, ignore_errors=True)
    return record


def _read_end(path: Path, exit_code: int, why: str | None) -> Record:
    """Return the record of a process that has ended; of one that could not say so, what it had until then."""
    record = read_record(path)
    if record["status"] == RUNNING:
        record |= {"status": FAILED, "why": why or f"its process ended with exit code {exit_code}"}
    return record


def _run(module: str, name: str, job: Job, path: Path, record: Record) -> None:
    with suppress(PermissionError):  # it leads a group already
        os.setsid()
    end = {"status": COMPLETE}
    try:
        piece = getattr(importlib.import_module(f"campaign.{module}"), name)
        record["shows"] = piece.__doc__.partition("\n")[0]
        for row in piece(job):
            _add(row, path, record)
    except NotRunError as reason:
        end = {"status": NOT_RUN, "why": str(reason)}
    except UnfinishedError as reason:
        end = {"status": UNFINISHED, "why": str(reason)}
    except ModuleNotFoundError as error:
        end = {"status": NOT_RUN, "why": f"{error.name} is not installed"}
        if (error.name or "").partition(".")[0] in OURS:
            end = {"status": FAILED, "why": traceback.format_exc()}
    except Exception:
        end = {"status": FAILED, "why": traceback.format_exc()}
    write_record(path, record | end)
    sys.stdout.flush()
    os._exit(0)  # not by way of what a broken CUDA context leaves to be cleaned up


def _add(row: Row, path: Path, record: Record) -> None:
    record["rows"].append(row)
    print(f"    {json.dumps(row, default=str)}", flush=True)
    write_record(path, record)
