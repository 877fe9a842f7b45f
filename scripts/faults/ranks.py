"""Ranks that die or hang while the others wait for them, and other ranks than before."""

import json
import os
import random
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from common.data.loader import Batch, Loader
from common.data.sampling import TrainSampler
from common.metrics.writers import read_metrics
from faults.lab import NO_CHANCE, ONE, TENSOR_PARALLEL, TWO, Lab, Mode, Recovery, Trial, fault, result
from faults.places import at, choose_place, kill
from faults.processes import expect

TIMEOUT = 20
FLOAT_ERROR = 1e-6  # of a loss in fp32 after 12 steps in other modes; another batch differs by 1e-2


def lost(lab: Lab, choice: random.Random, mode: Mode, number: int) -> Recovery:
    """Let a rank die or hang: the others, which no launcher ends, end within TIMEOUT and name it."""
    trial, clock = Trial(lab, mode.but(f"TIMEOUT = {TIMEOUT}")), lab.new_folder()
    rank, place = mode.choose_rank(choice), choose_place(choice, "step", "accumulation", "evaluation")
    print(f"    {mode.name}: rank {rank} gets {signal.Signals(number).name} at {place}", flush=True)

    def fail() -> None:
        clock.write_text(str(time.monotonic()))
        os.kill(os.getpid(), number)

    ended = lab.start(trial.mode, trial.output, at(place, fail, rank)).wait(lost=rank).expect_killed(rank)
    trial.seconds += ended.seconds
    others = [other for other in range(mode.size) if other != rank]
    expect(all(ended.codes[other] == 2 for other in others), f"{ended.codes}: {ended.printed}")
    for other in others:
        expect(f"rank {rank} is gone" in ended.outputs[other], f"rank {other} prints: {ended.outputs[other]}")
    waited = max(ended.ends[other] for other in others) - float(clock.read_text())
    expect(waited < TIMEOUT, f"it took {waited:.1f} s: {ended.printed}")
    return trial.resume()


for what, sent in (("dies", signal.SIGKILL), ("hangs", signal.SIGSTOP)):
    for each in (TWO, TENSOR_PARALLEL["dp2 x 1d-2"]):
        title = f"a rank {what}, the others name it within TIMEOUT: {each.name}"
        fault(title, 2, int(each == TWO), mode=each, number=sent)(lost)


def record_batches(file: Path) -> None:
    """Write down, a line for each image of a training batch, its place in the run and the checksum of its pixels."""
    batches = Loader._batches

    def recorded(self: Loader, epoch: int, start: int) -> Iterator[Batch]:
        with closing(batches(self, epoch, start)) as source, file.open("a") as lines:
            for number, (images, labels) in enumerate(source, start):
                if isinstance(sampler := self.sampler, TrainSampler):
                    step, micro_step = divmod(number, sampler.accumulation)
                    first = (micro_step * sampler.dp_size + sampler.dp_rank) * sampler.micro_batch
                    for row, image in enumerate(images, first):
                        lines.write(json.dumps([epoch, step, row, zlib.crc32(image.numpy().tobytes())]) + "\n")
                    lines.flush()
                yield images, labels

    Loader._batches = recorded


def read_batches(folder: Path) -> dict[tuple[int, int, int], set[int]]:
    """Return the images that were seen at each place: (epoch, step in it, row of the global batch)."""
    seen: dict[tuple[int, int, int], set[int]] = {}
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            *place, image = json.loads(line)
            seen.setdefault(tuple(place), set()).add(image)
    return seen


def losses(output: Path) -> list[tuple[str, int, float]]:
    """Return kind, step and loss of a run's records."""
    return [(record["kind"], record["step"], record["loss"]) for record in read_metrics(output)]


def other_ranks(lab: Lab, choice: random.Random, modes: list[Mode]) -> Recovery:
    """Kill a run in each mode, and resume it in the next: the same global batches, pixel by pixel, and losses."""
    modes = [mode.but(NO_CHANCE) for mode in modes]
    whole, pieces, seen_whole, seen_pieces = (lab.new_folder() for _ in range(4))
    for folder in (seen_whole, seen_pieces):
        folder.mkdir()
    seconds = -lab.run(modes[0], whole, lambda rank: record_batches(seen_whole / str(rank))).expect(0).seconds
    for number, mode in enumerate(modes):
        killing = at(choose_place(choice, "step", after=3 * number), kill, mode.choose_rank(choice))

        def inject(rank: int, number: int = number, killing=killing) -> None:
            record_batches(seen_pieces / f"{number} {rank}")
            if number < len(modes) - 1:
                killing(rank)

        ended = lab.run(mode, pieces, inject)
        seconds += ended.seconds
    ended.expect(0)
    batches, same = read_batches(seen_whole), read_batches(seen_pieces)
    others = [place for place in batches | same if batches.get(place) != same.get(place)]
    expect(not others, f"{len(others)} other images, e.g. at {others[:3]}")
    pairs = list(zip(losses(whole), losses(pieces), strict=True))
    expect(all(one[:2] == other[:2] for one, other in pairs), "other records")
    distance = max(abs(other[2] / one[2] - 1) for one, other in pairs)
    print(f"    losses differ by up to {distance:.1e}", flush=True)
    expect(distance <= FLOAT_ERROR, f"losses differ by {distance:.1e}")
    result(pieces)
    return Recovery(None, seconds)


CHAINS = [
    [ONE, TWO, TENSOR_PARALLEL["2d-4"]],
    [TENSOR_PARALLEL["1d-2"], ONE, TENSOR_PARALLEL["3d-8"]],
    [TENSOR_PARALLEL["2.5d-4"], TWO],
    [TWO, ONE],
]
for chain in CHAINS:
    names = ", ".join(mode.name for mode in chain)
    fault(f"killed, resumed in another mode: {names}", 1, int(chain == CHAINS[-1]), modes=chain)(other_ranks)
