"""Disks that fill up, turn read-only or disappear during a run, two runs into one folder, and failing writers."""

import itertools
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.checkpoint.save import MARKER, MODEL, TRAINER, find_fault, list_checkpoints
from common.metrics import writers
from common.testing.commands import wait_until
from faults.lab import ONE, TWO, Lab, Recovery, Trial, fault
from faults.places import Place, at, in_order, on, signal_self
from faults.processes import PATIENT, expect

SAVED = Place("step", 5)  # the checkpoint of step 3 is there, or soon will be
LATER = Place("step", 8)
IS_ROOT = os.geteuid() == 0  # and may mount file systems


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of 8 MB and 300 inodes."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=300", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", folder], check=True)


def await_checkpoint(output: Path) -> None:
    """Wait for the run's first checkpoint, which another thread writes."""
    wait_until(lambda: list_checkpoints(output / "checkpoints"))


def fill(output: Path) -> None:
    await_checkpoint(output)
    fill_disk(output.parent / "ballast")


def fill_disk(file: Path) -> None:
    """Write to ``file`` until the disk is full."""
    with suppress(OSError), file.open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))


def make_room(output: Path) -> None:
    (output.parent / "ballast").unlink(missing_ok=True)


def use_inodes(output: Path) -> None:
    await_checkpoint(output)
    (output.parent / "ballast").mkdir()
    with suppress(OSError):
        for number in itertools.count():
            (output.parent / "ballast" / str(number)).touch()


def free_inodes(output: Path) -> None:
    shutil.rmtree(output.parent / "ballast")


def turn_read_only(output: Path) -> None:
    """Make the checkpoint folder read-only; a disk cannot be while files on it are open for writing."""
    await_checkpoint(output)
    folder = output / "checkpoints"
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)


def turn_writable(output: Path) -> None:
    subprocess.run(["umount", output / "checkpoints"], check=True)


def disk_fails(
    lab: Lab, choice: random.Random, fail: Callable[[Path], None], mend: Callable[[Path], None], reason: str
) -> Recovery:
    """Make the disk fail from step 5 to the end, repair it, and resume."""
    with small_disk(lab.new_folder()) as disk:
        trial = Trial(lab, choice.choice((ONE, TWO)), disk / "run")
        failed = trial.run(at(SAVED, lambda: fail(trial.output), 0)).expect_code(0, 2)
        failed.expect_words(reason, "MB are free; the newest checkpoint is", "training continues", "error: ")
        checkpoints = list_checkpoints(trial.checkpoints)
        expect(checkpoints and not any(map(find_fault, checkpoints)), f"damaged: {checkpoints}")
        mend(trial.output)
        return trial.resume()


def full_for_a_while(lab: Lab, choice: random.Random) -> Recovery:
    with small_disk(lab.new_folder()) as disk:
        trial = Trial(lab, ONE, disk / "run")
        changes = at(SAVED, lambda: fill(trial.output)), at(LATER, lambda: make_room(trial.output))
        trial.run(in_order(*changes)).expect(0, "training continues")
        return trial.compare()


if IS_ROOT:
    fault("disk full", 2, fail=fill, mend=make_room, reason="No space left on device")(disk_fails)
    fault("inodes exhausted", 2, 0, fail=use_inodes, mend=free_inodes, reason="no inodes left")(disk_fails)
    fault("disk turns read-only", 2, 0, fail=turn_read_only, mend=turn_writable, reason="Read-only file")(disk_fails)
    fault("disk full for a while", 2, 0)(full_for_a_while)


@fault("output folder moved away", 1, 0)
def folder_vanishes(lab: Lab, choice: random.Random) -> Recovery:
    """Move the run's folder away: training continues in a new one, and the old one keeps its content."""
    trial = Trial(lab, ONE)
    away = trial.output.with_name("away")

    def move() -> None:
        await_checkpoint(trial.output)
        trial.output.rename(away)

    trial.run(at(SAVED, move)).expect(0)
    expect(not any(map(find_fault, list_checkpoints(away / "checkpoints"))), "a checkpoint is damaged")
    (trial.output / "metrics.jsonl").write_bytes((away / "metrics.jsonl").read_bytes())
    return trial.compare()


@fault("hostile files put into the run's folder", 1, 0)
def hostile_files(lab: Lab, choice: random.Random) -> Recovery:
    """Put a checkpoint of pipes and of a link to /dev/zero among a run's, stop it, and resume."""
    trial = Trial(lab, ONE)

    def put() -> None:
        await_checkpoint(trial.output)
        (fake := trial.checkpoints / "step-00000099").mkdir()
        (fake / MODEL).symlink_to("/dev/zero")
        for path in (fake / MARKER, fake / TRAINER, trial.output / "report.html"):
            os.mkfifo(path)

    stop = at(Place("step", 10), lambda: signal_self(signal.SIGTERM))
    trial.run(in_order(at(SAVED, put), stop), PATIENT).expect(143)
    return trial.resume()


@fault("two runs into one folder: the second is refused")
def two_runs(lab: Lab, choice: random.Random) -> Recovery:
    trial = Trial(lab, TWO)
    paused, resumed = (trial.output.with_name(name) for name in ("paused", "resumed"))

    def pause() -> None:
        paused.touch()
        wait_until(resumed.exists)

    first = trial.start(at(SAVED, pause, 0))
    wait_until(paused.exists)
    second = trial.run()
    resumed.touch()
    second.expect(2, f"{trial.output} is being written by process {first.pids[0]}")
    first.wait().expect(0)
    return Recovery(trial.compare().equal)


@fault("TensorBoard and curves fail")
def writers_fail(lab: Lab, choice: random.Random) -> Recovery:
    trial = Trial(lab, ONE, settings=["LOG.tensorboard=True"])

    def fail(*_: object) -> None:
        raise OSError("no more")

    def arrange() -> None:
        writers.TensorBoard.__call__ = writers.Curves.__call__ = fail

    reason = "OSError: no more; training continues without it"
    trial.run(on(None, arrange)).expect(0, *(f"warning: {name}: {reason}" for name in ("TensorBoard", "curves")))
    return trial.compare()
