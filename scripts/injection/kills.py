"""Processes that are killed, and checkpoints that are damaged."""

import contextlib
import functools
import io
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

from injection.bench import MODES, ONE, TWO, Bench, Fault, Mode, Recovery, choose_rank
from injection.processes import PATIENT, expect
from injection.victims import SAVING, SAVING_CALLS, Place, at, before_call, choose_place, kill, on, stop

from common.checkpoint.resume import choose_checkpoint
from common.checkpoint.save import MARKER, list_checkpoints, newest_checkpoint
from common.testing.ranks import launched


def killed(bench: Bench, choice: random.Random, mode: Mode, times: int = 1) -> Recovery:
    """Kill a random rank at a random place, ``times`` times; then go on to the end."""
    seconds, _ = bench.reference(mode)
    output, lost = bench.new_folder(), -seconds
    for _ in range(times):
        last = newest_checkpoint(output / "checkpoints")
        rank, place = choose_rank(choice, mode), choose_place(choice, after=int(last.name[5:]) if last else 0)
        print(f"    {mode.name}: rank {rank} is killed at {place}", flush=True)
        ended = bench.run(mode, output, on(rank, lambda place=place: at(place, kill)))
        expect(ended.codes[rank] == -signal.SIGKILL, f"it was not killed: {ended.codes}: {ended.said}")
        lost += ended.seconds
    lost += bench.run(mode, output).expect(0).seconds
    return Recovery(bench.is_equal(mode, output), lost)


def killed_while_saving(bench: Bench, choice: random.Random) -> Recovery:
    """Kill rank 0 at a random call of a save, with what it was writing cut in half; a whole checkpoint is there."""
    mode = choice.choice((ONE, TWO)).but(f"KEEP = {choice.choice((1, 2))}")
    seconds, _ = bench.reference(mode)
    output, call = bench.new_folder(), choice.randrange(SAVING_CALLS)
    print(f"    {mode.name}: killed at call {call} of saving", flush=True)
    folder = output / "checkpoints"

    def tear_and_kill() -> None:
        files = folder.glob(".*.partial/*")
        for path in sorted(files, key=lambda path: path.stat().st_mtime)[-1:]:
            os.truncate(path, path.stat().st_size // 2)
        kill()

    has_one = functools.partial(newest_checkpoint, folder)
    ended = bench.run(mode, output, on(0, lambda: before_call(SAVING, call, tear_and_kill, has_one)))
    expect(ended.codes[0] == -signal.SIGKILL, f"it was not killed: {ended.codes}")
    warnings = io.StringIO()
    with contextlib.redirect_stderr(warnings), launched():
        expect(choose_checkpoint("auto", output), "no checkpoint is whole")
    expect(not warnings.getvalue(), warnings.getvalue())
    lost = ended.seconds + bench.run(mode, output).expect(0).seconds - seconds
    return Recovery(bench.is_equal(mode, output), lost)


def truncate(checkpoint: Path, choice: random.Random) -> None:
    path = choice.choice([path for path in checkpoint.iterdir() if path.name != MARKER and path.stat().st_size])
    os.truncate(path, choice.randrange(path.stat().st_size))


def flip_a_bit(checkpoint: Path, choice: random.Random) -> None:
    path = choice.choice([path for path in checkpoint.iterdir() if path.name != MARKER and path.stat().st_size])
    content = bytearray(path.read_bytes())
    content[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
    path.write_bytes(content)


def remove_marker(checkpoint: Path, choice: random.Random) -> None:
    (checkpoint / MARKER).unlink()


def damaged(damage: Callable[[Path, random.Random], None], bench: Bench, choice: random.Random) -> Recovery:
    """Stop at step 10, damage the newest checkpoint, and go on from the one before."""
    mode = choice.choice((ONE, TWO))
    seconds, _ = bench.reference(mode)
    output = bench.new_folder()
    stopped = bench.run(mode, output, on(None, lambda: at(Place("step", 10), stop)), PATIENT).expect(143)
    newest, before = list_checkpoints(output / "checkpoints")
    damage(newest, choice)
    ended = bench.run(mode, output).expect(0)
    if (newest / MARKER).exists():  # without it, it was never there
        expect(f"warning: {newest} is damaged" in ended.said, f"no warning: {ended.said}")
    expect(f"going on from {before}" in ended.said, ended.said)
    return Recovery(bench.is_equal(mode, output), stopped.seconds + ended.seconds - seconds)


def all_damaged(bench: Bench, choice: random.Random) -> Recovery:
    """Damage every checkpoint: the run does not start again from nothing on top of them."""
    output = bench.new_folder()
    bench.run(ONE, output, on(None, lambda: at(Place("step", 10), stop)), PATIENT).expect(143)
    for path in list_checkpoints(output / "checkpoints"):
        truncate(path, choice)
    ended = bench.run(ONE, output).expect(2)
    expect("none of the 2 checkpoints is intact" in ended.said, ended.said)
    return Recovery()


def kill_faults(kills: int) -> list[Fault]:
    """Return the rows, with ``kills`` kills in all over the modes."""
    each, more = divmod(kills, len(MODES))
    rows = [
        Fault(
            f"kill -9 of a rank: {mode.name}",
            functools.partial(killed, mode=mode),
            each + (number < more),
            int(mode in (ONE, TWO)),
        )
        for number, mode in enumerate(MODES)
    ]
    return [
        *rows,
        Fault("kill -9 three times in a run", functools.partial(killed, mode=TWO, times=3), 3, 0),
        Fault("kill -9 while saving", killed_while_saving, 20, 2),
        Fault("newest checkpoint truncated", functools.partial(damaged, truncate), 3),
        Fault("newest checkpoint: a bit flipped", functools.partial(damaged, flip_a_bit), 3, 0),
        Fault("newest checkpoint without COMPLETE", functools.partial(damaged, remove_marker)),
        Fault("every checkpoint damaged: refused", all_damaged),
    ]
