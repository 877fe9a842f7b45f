"""Signals that ask a run to stop, at any time, to one of its processes or to all."""

import functools
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

from injection.bench import ONE, TENSOR_PARALLEL, TWO, WORKERS, Bench, Fault, Mode, Recovery, choose_rank
from injection.processes import PATIENT, Ended, expect
from injection.victims import Place, at, choose_place, on

from common.launch.stop_signals import exit_code, signal_name

AT_ONCE = 5.0  # seconds after a second Ctrl-C; the process sleeps longer


def signalled(number: int, scope: str, bench: Bench, choice: random.Random, mode: Mode) -> Recovery:
    """Send a signal at a random place of training, evaluation or start-up; then go on to the end."""
    seconds, _ = bench.reference(mode)
    output = bench.new_folder()
    events = ["step", "accumulation", "evaluation"] + (["start-up"] if scope == "all ranks" else [])
    place = choose_place(choice, *events)
    if place.event == "start-up":  # before, nobody has taken over the signals
        place = Place("start-up", max(1, place.number))
    rank = choose_rank(choice, mode) if scope == "one rank" else None
    print(f"    {mode.name}: {scope} at {place}", flush=True)
    stopped = bench.run(mode, output, on(rank, lambda: at(place, lambda: send_to_itself(number, scope))), PATIENT)
    stopped.expect(exit_code(number))
    check_message(stopped, number, place)
    lost = stopped.seconds + bench.run(mode, output).expect(0).seconds - seconds
    return Recovery(bench.is_equal(mode, output), lost)


def send_to_itself(number: int, scope: str) -> None:
    if scope == "process group":
        os.killpg(0, number)
    else:
        os.kill(os.getpid(), number)


def check_message(stopped: Ended, number: int, place: Place) -> None:
    words = "ended at once" if place.event == "start-up" else "stopped; the same command goes on from"
    expect(f"{signal_name(number)}: {words}" in stopped.said, stopped.said)


def signalled_any_time(bench: Bench, choice: random.Random) -> Recovery:
    """Send a signal to all from outside, at a random time once they have taken over the signals."""
    mode = choice.choice((ONE, TWO))
    number = choice.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
    seconds, _ = bench.reference(mode)
    output, delay = bench.new_folder(), choice.random() * seconds
    print(f"    {mode.name}: {signal_name(number)} {delay:.2f} s after the start", flush=True)
    ranks = bench.start(mode, output)
    while not all(map(has_taken_over, ranks.pids)):
        time.sleep(0.01)
    time.sleep(delay)
    ranks.send(number)
    stopped = ranks.wait(grace=PATIENT)
    expect(set(stopped.codes) <= {exit_code(number), 0}, f"{stopped.codes}: {stopped.said}")  # 0: it was over
    lost = stopped.expect(stopped.codes).seconds + bench.run(mode, output).expect(0).seconds - seconds
    return Recovery(bench.is_equal(mode, output), lost)


def has_taken_over(pid: int) -> bool:
    """Return whether a process has a handler for SIGUSR1, which Python has none for."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
        return bool(caught >> (signal.SIGUSR1 - 1) & 1)
    return True  # it has ended


def second_ctrl_c(bench: Bench, choice: random.Random) -> Recovery:
    """Press Ctrl-C twice while a step takes long: the second ends the run at once."""
    output = bench.new_folder()
    place = choose_place(choice, "step", "accumulation")

    def press_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGINT)
        pressed = time.monotonic()
        while time.monotonic() < pressed + 3 * AT_ONCE:
            time.sleep(0.1)

    ended = bench.run(TWO, output, on(None, lambda: at(place, press_twice))).expect(128 + signal.SIGINT)
    seconds, _ = bench.reference(TWO)
    lost = ended.seconds + bench.run(TWO, output).expect(0).seconds - seconds
    return Recovery(bench.is_equal(TWO, output), lost)


def stop_faults() -> list[Fault]:
    """Return the rows."""
    rows = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        for scope, mode in (("one rank", TWO), ("all ranks", TENSOR_PARALLEL[-1]), ("process group", WORKERS)):
            inject = functools.partial(signalled, number, scope, mode=mode)
            quick = int((number, scope) in ((signal.SIGTERM, "one rank"), (signal.SIGINT, "process group")))
            rows.append(Fault(f"{signal_name(number)} to {scope}: {mode.name}", inject, 3, quick))
    return [
        *rows,
        Fault("a signal at any time", signalled_any_time, 10, 1),
        Fault("a second Ctrl-C", second_ctrl_c, 1, 0),
    ]
