"""Killed processes and damaged checkpoints."""

import contextlib
import io
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common.checkpoint import hook as checkpoint_hook
from common.checkpoint import save as checkpoint
from common.checkpoint.resume import choose_checkpoint
from common.checkpoint.save import MARKER, list_checkpoints, newest_checkpoint
from common.testing.ranks import launched
from faults.lab import MODES, ONE, TWO, Lab, Mode, Recovery, Trial, fault
from faults.places import at, before_call, choose_place, kill, on
from faults.processes import expect

KILLS = 50  # of a rank at a random place, over all modes
SAVING = [
    (checkpoint, "save_file"),
    (checkpoint, "sync"),
    (checkpoint, "sha256_of"),
    (checkpoint_hook, "mark_best"),
    (checkpoint_hook, "clear_old"),
    (Path, "rename"),
]
SAVING_CALLS = 60  # in a run of 12 steps, after its first checkpoint


def killed(lab: Lab, choice: random.Random, mode: Mode, times: int = 1) -> Recovery:
    trial = Trial(lab, mode)
    for _ in range(times):
        last = newest_checkpoint(trial.checkpoints)
        rank, place = mode.choose_rank(choice), choose_place(choice, after=int(last.name[5:]) if last else 0)
        print(f"    {mode.name}: rank {rank} is killed at {place}", flush=True)
        trial.run(at(place, kill, rank)).expect_code(rank, -9)
    return trial.resume()


for number, each in enumerate(MODES):
    tries = KILLS // len(MODES) + (number < KILLS % len(MODES))
    fault(f"kill -9 of a rank: {each.name}", tries, int(each in (ONE, TWO)), mode=each)(killed)
fault("kill -9 three times in a run", 3, 0, mode=TWO, times=3)(killed)


@fault("kill -9 while saving", 20, 2)
def killed_while_saving(lab: Lab, choice: random.Random) -> Recovery:
    """Kill rank 0 at a random call of a save, with the file that it is writing cut in half."""
    trial = Trial(lab, choice.choice((ONE, TWO)).but(f"KEEP = {choice.choice((1, 2))}"))
    call = choice.randrange(SAVING_CALLS)
    print(f"    {trial.mode.name}: killed at call {call} of saving", flush=True)

    def tear_and_kill() -> None:
        files = trial.checkpoints.glob(".*.partial/*")
        for path in sorted(files, key=lambda path: path.stat().st_mtime)[-1:]:
            os.truncate(path, path.stat().st_size // 2)
        kill()

    has_one = partial(newest_checkpoint, trial.checkpoints)
    trial.run(on(0, lambda: before_call(SAVING, call, tear_and_kill, has_one))).expect_code(0, -9)
    warnings = io.StringIO()
    with contextlib.redirect_stderr(warnings), launched():
        expect(choose_checkpoint("auto", trial.output), "no checkpoint is intact")
    expect(not warnings.getvalue(), warnings.getvalue())
    return trial.resume()


def choose_file(folder: Path, choice: random.Random) -> Path:
    return choice.choice([path for path in sorted(folder.iterdir()) if path.name != MARKER and path.stat().st_size])


def truncate(folder: Path, choice: random.Random) -> None:
    path = choose_file(folder, choice)
    os.truncate(path, choice.randrange(path.stat().st_size))


def flip_a_bit(folder: Path, choice: random.Random) -> None:
    path = choose_file(folder, choice)
    content = bytearray(path.read_bytes())
    content[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
    path.write_bytes(content)


def remove_marker(folder: Path, choice: random.Random) -> None:
    (folder / MARKER).unlink()


def damaged(lab: Lab, choice: random.Random, damage: Callable[[Path, random.Random], None]) -> Recovery:
    """Damage the newest checkpoint: the run resumes from the one before."""
    trial = Trial(lab, choice.choice((ONE, TWO))).stop_at_step_10()
    newest, before = list_checkpoints(trial.checkpoints)
    damage(newest, choice)
    # without its marker it does not count as a checkpoint
    warning = [f"warning: {newest} is damaged"] if (newest / MARKER).exists() else []
    return trial.resume(f"resuming from {before}", *warning)


fault("newest checkpoint truncated", 3, damage=truncate)(damaged)
fault("newest checkpoint: a bit flipped", 3, 0, damage=flip_a_bit)(damaged)
fault("newest checkpoint without COMPLETE", damage=remove_marker)(damaged)


@fault("every checkpoint damaged: refused")
def all_damaged(lab: Lab, choice: random.Random) -> None:
    trial = Trial(lab, ONE).stop_at_step_10()
    for path in list_checkpoints(trial.checkpoints):
        truncate(path, choice)
    trial.run().expect(2, "none of the 2 checkpoints is intact")
