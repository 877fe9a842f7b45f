"""Disks that fill up, turn read-only or vanish under a run, two runs into one folder, and writers that fail."""

import functools
import os
import random
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from injection.bench import ONE, TWO, Bench, Fault, Recovery
from injection.processes import expect
from injection.victims import Place, at, on

from common.checkpoint.save import find_fault, list_checkpoints
from common.metrics import writers

DISK = "size=8m"
LARGEST = 32_768  # bytes: more than the logs of a run, less than its tensors
SAVED = Place("step", 5)  # the checkpoint of step 3 is there by then, or soon
LATER = Place("step", 8)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of 8 MB for a while; without the right to, yield a plain folder."""
    folder.mkdir()
    if os.geteuid() == 0:
        subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        if os.path.ismount(folder):
            subprocess.run(["umount", "--recursive", "--lazy", folder], check=True)


def await_checkpoint(output: Path) -> None:
    """Wait until the run has a checkpoint; its writer is another thread."""
    while not list_checkpoints(output / "checkpoints"):
        time.sleep(0.01)


def fill(output: Path) -> None:
    """Leave no room on the disk: for this process, where it is not allowed to mount a disk of its own."""
    await_checkpoint(output)
    if not os.path.ismount(output.parent):
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, resource.RLIM_INFINITY))
        return
    with suppress(OSError), (output.parent / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))


def make_room(output: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (output.parent / "ballast").unlink(missing_ok=True)


def turn_read_only(output: Path) -> None:
    """Show the folder of checkpoints read-only: a whole disk turns so only where no file is open for writing."""
    await_checkpoint(output)
    folder = output / "checkpoints"
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)


def turn_writable(output: Path) -> None:
    subprocess.run(["umount", output / "checkpoints"], check=True)


Change = Callable[[Path], None]


def disk_fails(fail: Change, mend: Change, reason: str, bench: Bench, choice: random.Random) -> Recovery:
    """Let the disk fail from step 5 on to the end, mend it, and run again."""
    mode = choice.choice((ONE, TWO))
    seconds, _ = bench.reference(mode)
    with small_disk(bench.new_folder()) as disk:
        output = disk / "run"
        failed = bench.run(mode, output, on(0, lambda: at(SAVED, lambda: fail(output))))
        expect(failed.codes[0] == 2, f"{failed.codes}: {failed.said}")
        for words in (reason, "MB are free; the newest checkpoint is", "training goes on", "error: "):
            expect(words in failed.said, f"{words!r} is not said: {failed.said}")
        checkpoints = list_checkpoints(output / "checkpoints")
        expect(checkpoints and not any(map(find_fault, checkpoints)), f"not whole: {checkpoints}")
        mend(output)
        ended = bench.run(mode, output).expect(0)
        equal = bench.is_equal(mode, output)
    return Recovery(equal, failed.seconds + ended.seconds - seconds)


def disk_fails_for_a_while(bench: Bench, choice: random.Random) -> Recovery:
    """Let the disk be full from step 5 to 8: the run ends as if nothing had been."""
    seconds, _ = bench.reference(ONE)
    with small_disk(bench.new_folder()) as disk:
        output = disk / "run"

        def arrange() -> None:
            at(SAVED, lambda: fill(output))
            at(LATER, lambda: make_room(output))

        ended = bench.run(ONE, output, on(0, arrange)).expect(0)
        expect("training goes on" in ended.said, ended.said)
        equal = bench.is_equal(ONE, output)
    return Recovery(equal, ended.seconds - seconds)


def folder_vanishes(bench: Bench, choice: random.Random) -> Recovery:
    """Move the run's folder away in the middle: training goes on into a new one, and the old one is left as it was."""
    seconds, _ = bench.reference(ONE)
    output = bench.new_folder()
    away = output.with_name(f"{output.name} away")

    def move() -> None:
        await_checkpoint(output)
        output.rename(away)

    ended = bench.run(ONE, output, on(0, lambda: at(SAVED, move))).expect(0)
    expect(not any(map(find_fault, list_checkpoints(away / "checkpoints"))), "a checkpoint is not whole")
    (output / "metrics.jsonl").write_bytes((away / "metrics.jsonl").read_bytes())
    return Recovery(bench.is_equal(ONE, output), ended.seconds - seconds)


def two_runs(bench: Bench, choice: random.Random) -> Recovery:
    """Start a second run into the folder of one that is in the middle: it is refused, and the first is unharmed."""
    bench.reference(TWO)
    output, go_on = bench.new_folder(), bench.new_folder()

    def pause() -> None:
        output.with_name("paused").touch()
        while not go_on.exists():
            time.sleep(0.01)

    first = bench.start(TWO, output, on(0, lambda: at(SAVED, pause)))
    while not output.with_name("paused").exists():
        time.sleep(0.01)
    second = bench.run(TWO, output)
    go_on.mkdir()
    expect(f"{output} is being written by process {first.pids[0]}" in second.said, second.said)
    second.expect(2)
    first.wait().expect(0)
    return Recovery(bench.is_equal(TWO, output))


def writers_fail(bench: Bench, choice: random.Random) -> Recovery:
    """Let TensorBoard and the curves fail at their first figures."""
    seconds, _ = bench.reference(ONE)
    output = bench.new_folder()

    def fail(*_: object) -> None:
        raise OSError("no more")

    def arrange() -> None:
        writers.TensorBoard.__call__ = writers.Curves.__call__ = fail

    ended = bench.run(ONE, output, on(None, arrange), settings=["LOG.tensorboard=True"]).expect(0)
    for name in ("TensorBoard", "curves"):
        expect(f"warning: {name}: OSError: no more; training goes on without it" in ended.said, ended.said)
    return Recovery(bench.is_equal(ONE, output), ended.seconds - seconds)


def disk_faults() -> list[Fault]:
    """Return the rows."""
    full = functools.partial(
        disk_fails, fill, make_room, "No space left on device" if os.geteuid() == 0 else "too large"
    )
    rows = [
        Fault("disk full", full, 2),
        Fault("disk full for a while", disk_fails_for_a_while, 2, 0),
        Fault("output folder moved away", folder_vanishes, 1, 0),
        Fault("two runs into one folder: the second is refused", two_runs),
        Fault("TensorBoard and curves fail", writers_fail),
    ]
    if os.geteuid() == 0:
        read_only = functools.partial(disk_fails, turn_read_only, turn_writable, "Read-only file system")
        rows.insert(2, Fault("disk turns read-only", read_only, 2, 0))
    return rows
