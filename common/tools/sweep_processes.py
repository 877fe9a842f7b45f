"""The processes of a sweep: several runs at a time, each on its share of the machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from common.errors import UserError
from common.launch.signals import stop_signals
from common.tools.sweep_grid import Planned


def run_all(planned: Mapping[Path, Planned], jobs: int) -> Generator[tuple[Path, int]]:
    """Run the commands, ``jobs`` at a time; yield folder and exit status of each that ends.

    A signal ends the iterator. At its end those that still run get the signal, or SIGTERM, and time
    to write their checkpoints.
    """
    # Places of one size, so that any run may take the next that is free.
    free = divide_machine(jobs, max(run.processes for run in planned.values()))
    waiting = list(planned.items())
    running = []
    stop_signals.install()
    # Without it a signal would end this process at once, and leave the runs alone with it.
    stop_signals.deferring = True
    try:
        # Looked at right after the sleep: a child may have ended by the same Ctrl-C.
        while (running or waiting) and not stop_signals.received:
            for ended in [entry for entry in running if entry[-1].poll() is not None]:
                running.remove(ended)
                folder, slot, log, child = ended
                free.append(slot)
                if log and child.returncode:
                    print(f"{log}:", *log.read_text().splitlines()[-3:], sep="\n", file=sys.stderr)
                yield folder, child.returncode
            while free and waiting:
                folder, run = waiting.pop(0)
                slot = free.pop(0)
                print(f"[{len(planned) - len(waiting)}/{len(planned)}] {folder.name}", flush=True)
                log = folder.with_name(f"{folder.name}.log") if jobs > 1 else None
                running.append((folder, slot, log, _start(run, *slot, log)))
            time.sleep(0.1)
    finally:
        for *_, child in running:
            child.send_signal(stop_signals.received or signal.SIGTERM)
        # One after the other is enough: all have the signal, and save at the same time.
        for *_, child in running:
            child.wait()
        stop_signals.restore()


def divide_machine(jobs: int, processes: int) -> list[tuple[list[int], list[str]]]:
    """Return the cores and the GPUs of each of ``jobs`` runs at a time, of ``processes`` each.

    Raises `UserError` where a run would have too few GPUs, or without any no core.
    """
    # Counts what CUDA_VISIBLE_DEVICES leaves, and creates no context on a GPU.
    visible = torch.cuda.device_count()
    every = ",".join(map(str, range(visible)))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")[:visible]
    cpus = sorted(os.sched_getaffinity(0))
    room = visible // processes if visible else len(cpus)
    if jobs > room:
        raise UserError(
            f"--jobs {jobs}: {visible} GPUs and {len(cpus)} cores are enough for --jobs {room}"
        )
    parts = zip(np.array_split(cpus, jobs), np.array_split(gpus, jobs), strict=True)
    return [(own_cpus.tolist(), own_gpus.tolist()) for own_cpus, own_gpus in parts]


def _start(
    run: Planned, cpus: list[int], gpus: list[str], log: Path | None
) -> subprocess.Popen[bytes]:
    """Start a run on its cores and GPUs, with its output at the end of ``log``."""
    environ = dict(os.environ)
    if gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[: run.processes])
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
    # A run's threads and its loader's workers are as many as the cores that it may use.
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)  # the child inherits it
    with log.open("ab") if log else nullcontext() as output:
        child = subprocess.Popen(run.command, env=environ, stdout=output, stderr=output)
    os.sched_setaffinity(0, every)
    return child
