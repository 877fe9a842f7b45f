"""Stop signals, sent to one or all processes of a run."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

from common.launch.stop_signals import exit_code, signal_name
from faults.lab import ONE, TENSOR_PARALLEL, TWO, WORKERS, Lab, Mode, Recovery, Trial, fault
from faults.places import Place, at, choose_place, signal_self
from faults.processes import PATIENT, expect

LONG_STEP = 15.0  # seconds, in which a second Ctrl-C must end the run


def signalled(lab: Lab, choice: random.Random, number: int, scope: str, mode: Mode) -> Recovery:
    trial = Trial(lab, mode)
    place = choose_place(choice, "step", "accumulation", "evaluation", *["start-up"] * (scope == "all ranks"))
    if place.event == "start-up":  # the handlers are installed in the first call
        place = Place("start-up", max(1, place.number))
    rank = mode.choose_rank(choice) if scope == "one rank" else None
    print(f"    {mode.name}: {scope} at {place}", flush=True)
    send = (lambda: os.killpg(0, number)) if scope == "process group" else (lambda: signal_self(number))
    has_saved = place.event != "start-up"
    words = "stopped; rerun the command to resume from" if has_saved else "exiting"
    code = exit_code(number, has_saved=has_saved)
    trial.run(at(place, send, rank), PATIENT).expect(code, f"{signal_name(number)}: {words}")
    return trial.resume()


for signal_number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    for to, each in (("one rank", TWO), ("all ranks", TENSOR_PARALLEL["dp2 x 1d-2"]), ("process group", WORKERS)):
        quick = int((signal_number, to) in ((signal.SIGTERM, "one rank"), (signal.SIGINT, "process group")))
        title = f"{signal_name(signal_number)} to {to}: {each.name}"
        fault(title, 3, quick, number=signal_number, scope=to, mode=each)(signalled)


@fault("a signal at any time", 10)
def signalled_any_time(lab: Lab, choice: random.Random) -> Recovery:
    """Send a signal to all ranks at a random time after their handlers are installed."""
    trial = Trial(lab, choice.choice((ONE, TWO)))
    number = choice.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
    delay = choice.random() * lab.reference(trial.mode)[0]
    print(f"    {trial.mode.name}: {signal_name(number)} {delay:.2f} s after the start", flush=True)
    ranks = trial.start()
    while not all(map(has_handlers, ranks.pids)):
        time.sleep(0.01)
    time.sleep(delay)
    ranks.send(number)
    stopped = ranks.wait(grace=PATIENT)
    trial.seconds += stopped.seconds
    codes = {exit_code(number), exit_code(number, has_saved=False), 0}  # 0: it was finished
    expect(set(stopped.codes) <= codes, f"{stopped.codes}: {stopped.printed}")
    stopped.expect(stopped.codes)
    return trial.resume()


def has_handlers(pid: int) -> bool:
    """Return whether a process handles SIGUSR1 (plain Python does not) or has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
        return bool(caught >> (signal.SIGUSR1 - 1) & 1)
    return True


@fault("a second Ctrl-C", 1, 0)
def second_ctrl_c(lab: Lab, choice: random.Random) -> Recovery:
    trial = Trial(lab, TWO)

    def press_twice() -> None:
        for pause in (1.5, LONG_STEP):
            signal_self(signal.SIGINT)
            until = time.monotonic() + pause
            while time.monotonic() < until:
                time.sleep(0.1)

    trial.run(at(choose_place(choice, "step", "accumulation"), press_twice)).expect(128 + signal.SIGINT)
    return trial.resume()
