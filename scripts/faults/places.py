"""Where in a run a fault is injected. `Ranks` calls an `Inject` in each process."""

import itertools
import os
import random
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import common.run.start
from common.colossal import BaseHook, Trainer
from common.run.run import Run
from faults.processes import Inject
from imagenet_dali import train_dali

Action = Callable[[], object]
START_UP = [
    (train_dali, "start_run"),
    (common.run.start, "start"),
    (common.run.start, "ask_first_rank"),
    (train_dali, "build_model"),
    (train_dali, "build_eval_loader"),
    (train_dali, "initialize"),
    (train_dali, "Trainer"),
]
EVENTS = {"step": range(1, 13), "accumulation": range(12), "evaluation": (9, 12), "start-up": range(len(START_UP))}


class Place(NamedTuple):
    """A moment of a run: ``event`` of `EVENTS`, after how many steps or calls, before or after the other hooks."""

    event: str
    number: int
    priority: int = 5

    def __str__(self) -> str:
        when = {-1: "before", 5: "among", 20: "after"}[self.priority]
        return f"{self.event} {self.number}" + ("" if self.event == "start-up" else f", {when} the hooks")


def choose_place(choice: random.Random, *events: str, after: int = 0) -> Place:
    """Return a place of one of ``events`` (default: all) that a run resumed ``after`` a step reaches."""
    event = choice.choice(events or list(EVENTS))
    first = {"step": after + 1, "accumulation": after, "evaluation": after + 1, "start-up": 0}[event]
    numbers = [number for number in EVENTS[event] if number >= first]
    return Place(event, choice.choice(numbers), choice.choice((-1, 5, 20))) if numbers else Place("start-up", 0)


def on(rank: int | None, arrange: Action) -> Inject:
    """Call ``arrange`` on ``rank``, or on all ranks (None)."""
    return lambda own: arrange() if rank in (None, own) else None


def in_order(*injects: Inject) -> Inject:
    return lambda rank: [inject(rank) for inject in injects]


def at(place: Place, action: Action, rank: int | None = None) -> Inject:
    """Call ``action`` at ``place`` on ``rank``, or on all ranks (None)."""
    if place.event == "start-up":
        return on(rank, lambda: before_call([START_UP[place.number]], 0, action))
    return on(rank, lambda: add_hook(_AtPlace(place, action)))


class _AtPlace(BaseHook):
    """Call ``action`` once, at ``place``."""

    def __init__(self, place: Place, action: Action) -> None:
        super().__init__(place.priority)
        self.place, self.action = place, action

    def _reach(self, event: str, number: int) -> None:
        if (event, number) == self.place[:2]:
            self.place = Place("", 0)
            self.action()

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        self._reach("step" if trainer.update_done else "accumulation", trainer.step)

    def after_test_iter(self, trainer: Trainer, *_: Any) -> None:
        self._reach("evaluation", trainer.step)


def add_hook(hook: BaseHook) -> None:
    build = Run.build_hooks
    Run.build_hooks = lambda self, *arguments: [*build(self, *arguments), hook]


def before_call(
    functions: list[tuple[Any, str]], number: int, action: Action, counts: Callable[[], object] = lambda: True
) -> None:
    """Call ``action`` before call ``number`` (from 0) of any of ``functions``; only calls where ``counts()`` count."""
    calls = itertools.count()

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if counts() and next(calls) == number:
                action()
            return function(*arguments, **options)

        return wrapped

    for owner, name in functions:
        setattr(owner, name, wrap(getattr(owner, name)))


def signal_self(number: int) -> None:
    """Send a signal to this process; SIGKILL ends it as a crash does."""
    os.kill(os.getpid(), number)


def kill() -> None:
    signal_self(signal.SIGKILL)
