"""Ranks that die or hang while the others wait, and runs resumed with different ranks."""

import json
import multiprocessing
import random
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import common.checkpoint.hook
from common.data.loader import Batch, Loader
from common.data.sampling import TrainSampler
from common.metrics.writers import read_metrics
from faults.lab import (
    NO_CHANCE,
    ONE,
    TENSOR_PARALLEL,
    TWO,
    WORKERS,
    ZERO,
    Lab,
    Mode,
    Recovery,
    Trial,
    fault,
    read_result,
)
from faults.places import Place, at, before_call, choose_place, in_order, kill, on, signal_self
from faults.processes import PATIENT, expect

TIMEOUT = 20
FLOAT_ERROR = 1e-6  # of a loss in fp32 after 12 steps in other modes; another batch differs by 1e-2


def lost(lab: Lab, choice: random.Random, mode: Mode, number: int) -> Recovery:
    """Kill or suspend a rank, without a launcher: the others exit within TIMEOUT and report it."""
    trial, clock = Trial(lab, mode.but(f"TIMEOUT = {TIMEOUT}")), lab.new_folder()
    rank, place = mode.choose_rank(choice), choose_place(choice, "step", "accumulation", "evaluation")
    print(f"    {mode.name}: rank {rank} gets {signal.Signals(number).name} at {place}", flush=True)

    def fail() -> None:
        clock.write_text(str(time.monotonic()))
        signal_self(number)

    ended = trial.run(at(place, fail, rank), lost=rank).expect_code(rank, -9)
    others = [other for other in range(mode.size) if other != rank]
    for other in others:
        ended.expect_code(other, 2)
        expect(f"rank {rank} is gone" in ended.outputs[other], f"rank {other} prints: {ended.outputs[other]}")
    waited = max(ended.ends[other] for other in others) - float(clock.read_text())
    expect(waited < TIMEOUT, f"it took {waited:.1f} s: {ended.printed}")
    return trial.resume()


for what, sent in (("dies", signal.SIGKILL), ("hangs", signal.SIGSTOP)):
    for each in (TWO, TENSOR_PARALLEL["dp2 x 1d-2"]):
        title = f"a rank {what}, the others name it within TIMEOUT: {each.name}"
        fault(title, 2, int(each == TWO), mode=each, number=sent)(lost)


@fault("a decoding worker is killed", 3)
def killed_worker(lab: Lab, choice: random.Random) -> Recovery:
    """Kill a decoding worker of a rank: both ranks save, report the worker and exit with 2."""
    trial, rank = Trial(lab, WORKERS), WORKERS.choose_rank(choice)

    def kill_worker() -> None:
        choice.choice(multiprocessing.active_children()).kill()

    # the other rank exits first, so that the launcher sends SIGTERM to rank 0, which reports the worker
    slow = on(0, lambda: before_call([(common.checkpoint.hook, "AgreedError")], 0, lambda: time.sleep(0.5)))
    killing = at(Place("step", choice.randrange(1, 8)), kill_worker, rank)
    stopped = trial.run(in_order(slow, killing), PATIENT)
    stopped.expect(2, "a worker has died", "was killed by SIGKILL", "rerun the command to resume from")
    return trial.resume()


def record_batches(file: Path) -> None:
    """Record the position in the run and the pixel checksum of each training image, one per line."""
    batches = Loader._batches

    def recorded(self: Loader, epoch: int, start: int) -> Iterator[Batch]:
        with closing(batches(self, epoch, start)) as source, file.open("a") as lines:
            for number, (images, labels) in enumerate(source, start):
                if isinstance(sampler := self.sampler, TrainSampler):
                    step, first = sampler.place(number)
                    for row, image in enumerate(images, first):
                        lines.write(json.dumps([epoch, step, row, zlib.crc32(image.numpy().tobytes())]) + "\n")
                    lines.flush()
                yield images, labels

    Loader._batches = recorded


def read_batches(folder: Path) -> dict[tuple[int, ...], set[int]]:
    """Return the checksums recorded for each (epoch, step in it, row of the global batch)."""
    seen: dict[tuple[int, ...], set[int]] = {}
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            *place, image = json.loads(line)
            seen.setdefault(tuple(place), set()).add(image)
    return seen


def resumed_in_other_modes(lab: Lab, choice: random.Random, modes: list[Mode]) -> Recovery:
    """Kill a run in each mode and resume it in the next: the global batches, pixel by pixel, and losses are the same.

    The reference is an uninterrupted run in the first mode.
    """
    trials = [Trial(lab, modes[0].but(NO_CHANCE))]
    pieces, folders = lab.new_folder(), [lab.new_folder(), lab.new_folder()]
    for folder in folders:
        folder.mkdir()
    whole = trials[0].run(lambda rank: record_batches(folders[0] / str(rank))).expect(0)
    for number, mode in enumerate(modes):
        killing = at(choose_place(choice, "step", after=3 * number), kill, mode.choose_rank(choice))
        arrange = [lambda rank, number=number: record_batches(folders[1] / f"{number} {rank}"), killing]
        trials.append(Trial(lab, mode.but(NO_CHANCE), pieces))
        is_last = number == len(modes) - 1
        ended = trials[-1].run(in_order(*arrange[: 2 - is_last]))
    ended.expect(0)
    one, other = map(read_batches, folders)
    different = [place for place in one | other if one.get(place) != other.get(place)]
    expect(not different, f"{len(different)} other images, e.g. at {different[:3]}")
    pairs = list(zip(read_metrics(trials[0].output), read_metrics(pieces), strict=True))
    expect(all(a[key] == b[key] for a, b in pairs for key in ("kind", "step")), "other records")
    distance = max(abs(b["loss"] / a["loss"] - 1) for a, b in pairs)
    print(f"    losses differ by up to {distance:.1e}", flush=True)
    expect(distance <= FLOAT_ERROR, f"losses differ by {distance:.1e}")
    read_result(pieces)
    return Recovery(None, sum(trial.seconds for trial in trials[1:]) - whole.seconds)


CHAINS = [
    [ONE, TWO, TENSOR_PARALLEL["2d-4"]],
    [TENSOR_PARALLEL["1d-2"], ONE, TENSOR_PARALLEL["3d-8"]],
    [TENSOR_PARALLEL["2.5d-4"], TWO],
    [TWO, ONE],
    [TWO, ZERO, ONE],
]
for chain in CHAINS:
    names = ", ".join(mode.name for mode in chain)
    fault(f"killed, resumed in another mode: {names}", 1, int(chain == CHAINS[-2]), modes=chain)(resumed_in_other_modes)
