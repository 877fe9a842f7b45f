"""Ranks that die or hang while the others wait, and runs resumed with different ranks."""

import multiprocessing
import random
import signal
import time

import common.checkpoint.hook
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
FLOAT_ERROR = 1e-6  # of a loss in fp32 after 12 steps in other modes


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


def resumed_in_other_modes(lab: Lab, choice: random.Random, modes: list[Mode]) -> Recovery:
    """Kill a run in each mode and resume it in the next: records and losses are those of an uninterrupted run.

    Equal losses show equal global batches: another batch differs by 1e-2.
    """
    whole, pieces = Trial(lab, modes[0].but(NO_CHANCE)), [Trial(lab, modes[0].but(NO_CHANCE))]
    whole.run().expect(0)
    for number, mode in enumerate(modes[1:], 1):
        place = choose_place(choice, "step", after=3 * number - 3)
        pieces[-1].run(at(place, kill, modes[number - 1].choose_rank(choice)))
        pieces.append(Trial(lab, mode.but(NO_CHANCE), pieces[0].output))
    pieces[-1].run().expect(0)
    pairs = list(zip(read_metrics(whole.output), read_metrics(pieces[0].output), strict=True))
    expect(all(a[key] == b[key] for a, b in pairs for key in ("kind", "step")), "other records")
    distance = max(abs(b["loss"] / a["loss"] - 1) for a, b in pairs)
    print(f"    losses differ by up to {distance:.1e}", flush=True)
    expect(distance <= FLOAT_ERROR, f"losses differ by {distance:.1e}")
    read_result(pieces[0].output)
    return Recovery(None, sum(trial.seconds for trial in pieces) - whole.seconds)


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
