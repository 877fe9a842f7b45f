"""Ranks that die or hang while the others wait for them, and other ranks than before."""

import functools
import json
import os
import random
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from injection.bench import (
    NO_CHANCE,
    ONE,
    TENSOR_PARALLEL,
    TWO,
    Bench,
    Fault,
    Mode,
    Recovery,
    choose_rank,
    losses,
    result,
)
from injection.processes import expect
from injection.victims import Place, at, choose_place, kill, on

from common.data.loader import Batch, Loader
from common.data.sampling import TrainSampler

TIMEOUT = 20
FLOAT_ERROR = 1e-6  # of a loss in fp32 after 12 steps in other modes; another batch differs by 1e-2
BY_NAME = {mode.name: mode for mode in TENSOR_PARALLEL}


def lost(what: str, number: int, bench: Bench, choice: random.Random, mode: Mode) -> Recovery:
    """Let a rank die or stand still: the others, which no launcher ends, end within TIMEOUT and name it."""
    mode = mode.but(f"TIMEOUT = {TIMEOUT}")
    seconds, _ = bench.reference(mode)
    output, clock = bench.new_folder(), bench.new_folder()
    rank, place = choose_rank(choice, mode), choose_place(choice, "step", "accumulation", "evaluation")
    print(f"    {mode.name}: rank {rank} {what} at {place}", flush=True)

    def fail() -> None:
        clock.write_text(str(time.monotonic()))
        os.kill(os.getpid(), number)

    ended = bench.start(mode, output, on(rank, lambda: at(place, fail))).wait(lost=rank)
    others = [other for other in range(mode.size) if other != rank]
    expect(ended.codes[rank] == -signal.SIGKILL, f"{ended.codes}: {ended.said}")
    expect(all(ended.codes[other] == 2 for other in others), f"{ended.codes}: {ended.said}")
    for other in others:
        expect(f"rank {rank} is gone" in ended.outputs[other], f"rank {other} says: {ended.outputs[other]}")
    waited = max(ended.ends[other] for other in others) - float(clock.read_text())
    expect(waited < TIMEOUT, f"it took {waited:.1f} s: {ended.said}")
    ended_again = bench.run(mode, output).expect(0)
    return Recovery(bench.is_equal(mode, output), ended.seconds + ended_again.seconds - seconds)


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


def other_ranks(modes: list[Mode], bench: Bench, choice: random.Random) -> Recovery:
    """Kill a run in each mode, and go on in the next: the same global batches, pixel by pixel, and the same losses."""
    modes = [mode.but(NO_CHANCE) for mode in modes]
    whole, pieces = bench.new_folder(), bench.new_folder()
    seen_whole, seen_pieces = bench.new_folder(), bench.new_folder()
    for folder in (seen_whole, seen_pieces):
        folder.mkdir()
    seconds = bench.run(modes[0], whole, lambda rank: record_batches(seen_whole / str(rank))).expect(0).seconds
    seconds_lost = -seconds
    for number, mode in enumerate(modes):
        rank, place = choose_rank(choice, mode), choose_place(choice, "step", after=3 * number)

        def fault(own: int, rank: int = rank, place: Place = place, number: int = number) -> None:
            record_batches(seen_pieces / f"{number} {own}")
            if own == rank and number < len(modes) - 1:
                at(place, kill)

        seconds_lost += bench.run(mode, pieces, fault).seconds
    batches, same = read_batches(seen_whole), read_batches(seen_pieces)
    others = [place for place in batches | same if batches.get(place) != same.get(place)]
    expect(not others, f"{len(others)} other images, e.g. at {others[:3]}")
    pairs = list(zip(losses(whole), losses(pieces), strict=True))
    expect(all(one[:2] == other[:2] for one, other in pairs), "other records")
    distance = max(abs(other[2] / one[2] - 1) for one, other in pairs)
    expect(distance <= FLOAT_ERROR, f"losses differ by {distance:.1e}")
    print(f"    losses differ by up to {distance:.1e}")
    result(pieces)
    return Recovery(None, seconds_lost)


def rank_faults() -> list[Fault]:
    """Return the rows."""
    rows = []
    for what, number in (("dies", signal.SIGKILL), ("hangs", signal.SIGSTOP)):
        for mode in (TWO, BY_NAME["dp2 x 1d-2"]):
            name = f"a rank {what}, the others name it within TIMEOUT: {mode.name}"
            rows.append(Fault(name, functools.partial(lost, what, number, mode=mode), 2, int(mode == TWO)))
    chains = [
        [ONE, TWO, BY_NAME["2d-4"]],
        [BY_NAME["1d-2"], ONE, BY_NAME["3d-8"]],
        [BY_NAME["2.5d-4"], TWO],
        [TWO, ONE],
    ]
    for number, modes in enumerate(chains):
        name = f"killed, goes on in another mode: {', '.join(mode.name for mode in modes)}"
        rows.append(Fault(name, functools.partial(other_ranks, modes), 1, int(number == 3)))
    return rows
