"""Detect which rank is lost, and report what it was doing.

Each rank sends a UDP datagram to rank 0 at every beat; rank 0 answers. A silent rank is gone. A rank hangs if it still
sends but does not notice a failed collective that all others noticed, or if it is behind when no rank makes progress.
PyTorch's store cannot do this: its calls block when the process that serves it stops. A rank that has never been heard,
for example behind a firewall that drops UDP, is not judged.

Hosts run ahead of their GPUs: a process that waits for its GPU notices no failure, and its progress says nothing about
the GPU's. A process whose GPU is idle is blamed first; if all wait for their GPUs, which of them hangs is not known.
"""

import faulthandler
import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common.colossal.rendezvous import address_to_bind

SILENT = 3  # beats of silence after which a rank is gone, once another rank has noticed a failure
HANGING = 5  # beats within which all ranks that do not hang notice it too
LEAVING = 2  # beats during which the verdict is sent

_doing = "starting"
_changes = 0


def doing(what: str) -> None:
    """Record what this process is doing; the other ranks report it if this one is lost."""
    global _doing, _changes
    _doing, _changes = what, _changes + 1


def progress() -> int:
    """Return how often `doing` was called."""
    return _changes


def beat_of(timeout: float) -> float:
    """Return the seconds between two beats, short enough to report a lost rank within the timeout."""
    return min(2.0, timeout / 40)


def patience_of(timeout: float) -> float:
    """Return the seconds that a collective may take; the rest of ``timeout`` is for detecting the lost rank."""
    return timeout - (HANGING + LEAVING + 1) * beat_of(timeout)


class Heard(NamedTuple):
    """What a rank last said of itself, when, and since when its progress is the same."""

    rank: int
    when: float
    moved_at: float
    doing: str = "starting"
    state: str = "running"
    waits_for_gpu: bool = False
    progress: int = -1  # it has said nothing yet


class Heartbeat:
    """A thread that exchanges beats and detects lost ranks; prints all stacks if this process makes no progress.

    ``verdict`` describes the lost ranks once they are known. A process that is not in `await_verdict` at that time,
    because it computes or its collective does not fail, exits with the verdict on stderr.
    """

    def __init__(self, rank: int, world_size: int, timeout: float):
        self.rank, self.world_size = rank, world_size
        self.timeout, self.beat, self.patience = timeout, beat_of(timeout), patience_of(timeout)
        self.state = "running"  # then "noticed" (a collective failed), "failed" (an error of its own) or "ended"
        self.device: torch.device | None = None  # the GPU of this process
        self.changed_at = time.monotonic()  # when `doing` was last called, as seen by the thread
        self.heard: dict[int, Heard] = {}  # by rank
        self.unheard: set[int] = set()  # ranks not heard yet
        self.warn_at = float("inf")  # when to warn of them
        self.noticed_at = float("inf")
        self.verdict: str | None = None
        self.judged, self.closing = threading.Event(), threading.Event()
        self.socket: Any = None  # stays None with a single process
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self, store: dist.Store | None, host: str) -> None:
        """Start the thread; without ``store`` (a single process) it monitors only its own progress."""
        if store is not None:
            self._open(store, host)
        self.thread.start()

    def _open(self, store: dist.Store, host: str) -> None:
        family, address = address_to_bind(host)
        if self.rank == 0:
            self.socket = socket.socket(family, socket.SOCK_DGRAM)
            self.socket.bind((address, 0))
            place = {"family": family, "port": self.socket.getsockname()[1], "token": secrets.token_hex(8)}
            store.set("heartbeat", json.dumps(place))
        else:
            place = json.loads(store.get("heartbeat"))
            *_, server = socket.getaddrinfo(host, place["port"], place["family"], socket.SOCK_DGRAM)[0]
            self.socket = socket.socket(place["family"], socket.SOCK_DGRAM)
            self.socket.connect(server)
        self.token = place["token"]
        now = time.monotonic()
        self.heard = {rank: Heard(rank, now, now) for rank in (range(self.world_size) if not self.rank else [0])}
        self.unheard, self.warn_at = set(self.heard) - {self.rank}, now + HANGING * self.beat

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        seen = -1
        with self.socket or nullcontext():
            while self.verdict is None and not self.closing.is_set():
                if seen != _changes:
                    seen, self.changed_at = _changes, time.monotonic()
                    faulthandler.dump_traceback_later(self.timeout, file=sys.__stderr__)
                if self.socket is None:
                    self.closing.wait(self.beat)
                else:
                    self._beat()
            if self.verdict is not None:
                self._end(self.verdict)

    def _beat(self) -> None:
        began = time.monotonic()
        self._exchange(began + self.beat)
        now = time.monotonic()
        was_suspended = now - began > 2 * self.beat  # then it has yet to read what the others sent in the meantime
        if not was_suspended and self.verdict is None and not self.closing.is_set():
            self.verdict = self._judge(now)

    def _exchange(self, until: float) -> None:
        """Send this rank's state, then receive until the next beat."""
        if self.rank:
            with suppress(OSError):  # refused: rank 0 is gone
                self.socket.send(self._message())
        while (left := until - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                data, sender = self.socket.recvfrom(65_535)
            except OSError:  # timeout, or refused
                self.closing.wait(max(0.0, min(left, until - time.monotonic())))
                return
            with suppress(OSError, ValueError, KeyError, TypeError):  # an unrelated datagram
                self._hear(json.loads(data), sender)

    def _message(self) -> bytes:
        return json.dumps(self._own_state() | {"token": self.token, "verdict": self.verdict}).encode()

    def _own_state(self) -> dict[str, Any]:
        state = {"rank": self.rank, "doing": _doing[:500], "state": self.state}
        return state | {"waits_for_gpu": self._waits_for_gpu(), "progress": _changes}

    def _waits_for_gpu(self) -> bool:
        """Return whether the GPU has unfinished work; asked only of a process without progress for long."""
        if self.device is None or time.monotonic() - self.changed_at < self.patience / 2:
            return False
        with suppress(RuntimeError):  # a broken GPU
            return not torch.cuda.default_stream(self.device).query()
        return True

    def _hear(self, message: dict[str, Any], sender: Any) -> None:
        if message["token"] != self.token or message["rank"] not in self.heard:
            return
        self._note(message)
        if self.rank == 0:
            self.socket.sendto(self._message(), sender)
        elif message["verdict"]:
            self.verdict = message["verdict"]

    def _note(self, state: dict[str, Any]) -> None:
        now, rank, progress = time.monotonic(), state["rank"], state["progress"]
        moved_at = self.heard[rank].moved_at if self.heard[rank].progress == progress else now
        self.heard[rank] = Heard(rank, now, moved_at, state["doing"], state["state"], state["waits_for_gpu"], progress)
        self.unheard.discard(rank)

    def _judge(self, now: float) -> str | None:
        """Return the lost ranks and what they were doing; "" if a collective failed but none is lost; else None."""
        if self.rank == 0:
            self._note(self._own_state())
            self._warn_of_unheard(now)
        if self.state == "noticed" or any(last.state == "noticed" for last in self.heard.values()):
            self.noticed_at = min(self.noticed_at, now)
        heard = [last for rank, last in self.heard.items() if rank not in self.unheard]
        running = [last for last in heard if last.state in ("running", "failed")]
        limit = SILENT * self.beat if self.noticed_at <= now else self.patience
        if silent := [last for last in running if now - last.when > limit]:
            return "; ".join(f"rank {last.rank} is gone; last seen: {last.doing}" for last in silent)
        if self.rank == 0 and now - self.noticed_at > HANGING * self.beat:
            return _name_hanging(running)
        if self.rank == 0 and all(now - last.moved_at > self.timeout for last in heard):
            return _name_behind(running, heard)
        return None

    def _warn_of_unheard(self, now: float) -> None:
        if self.unheard and now > self.warn_at:
            self.warn_at = float("inf")
            ranks, port = ", ".join(map(str, sorted(self.unheard))), self.socket.getsockname()[1]
            text = f"no datagram from rank {ranks} at UDP port {port}: behind a firewall, a lost rank is not reported"
            print(f"warning: {text}", file=sys.__stderr__, flush=True)

    def _end(self, verdict: str) -> None:
        """Send the verdict to the other ranks; exit unless this process is in `await_verdict`."""
        self.judged.set()
        for _ in range(LEAVING):
            self._exchange(time.monotonic() + self.beat)
        if self.state == "running" and not self.closing.is_set():
            if f"rank {self.rank} " in verdict:
                faulthandler.dump_traceback(file=sys.__stderr__)
            print(f"error: {describe(verdict, self.world_size)}", file=sys.__stderr__, flush=True)
            os._exit(2)

    # --- the process --------------------------------------------------------------------------------------------------

    def await_verdict(self) -> str:
        """Return the lost ranks after a failed collective; "" if none."""
        faulthandler.cancel_dump_traceback_later()
        self.state = "noticed"
        self.judged.wait((HANGING + SILENT) * self.beat)
        if self.rank == 0:
            self.thread.join(LEAVING * self.beat + 1)  # it sends the verdict
        return self.verdict or ""

    def fail(self, error: str) -> None:
        """Send the message ``error`` to the other ranks before this process exits."""
        doing(error)
        self.state = "failed"
        self.closing.wait(LEAVING * self.beat if self.world_size > 1 else 0)

    def close(self) -> None:
        """Stop; rank 0 first waits a few beats for the others to stop."""
        failed, self.state = self.state != "running", "ended"
        if self.rank:
            with suppress(OSError):
                self.socket.send(self._message())
        elif not failed:
            deadline = time.monotonic() + HANGING * self.beat
            others = set(self.heard) - {0} - self.unheard
            while time.monotonic() < deadline and any(self.heard[rank].state == "running" for rank in others):
                time.sleep(self.beat / 20)
        self.closing.set()
        faulthandler.cancel_dump_traceback_later()


def _name_behind(running: list[Heard], heard: list[Heard]) -> str | None:
    """Return the ranks that are behind where none makes progress; None if all have come equally far."""
    judged = [last for last in running if not last.waits_for_gpu]
    if running and not judged:
        return _name_hanging(running)
    least = min((last.progress for last in heard if not last.waits_for_gpu), default=0)
    behind = [last for last in judged if last.progress == least]
    return _name_hanging(behind) if 0 < len(behind) < len(heard) else None


def _name_hanging(ranks: list[Heard]) -> str:
    idle = [last for last in ranks if not last.waits_for_gpu]
    how = "hangs" if idle else "waits for its GPU"
    named = "; ".join(f"rank {last.rank} {how}; last seen: {last.doing}" for last in idle or ranks)
    return named if idle or not ranks else f"one GPU hangs, or NCCL between them: {named}"


def describe(verdict: str, world_size: int) -> str:
    """Return the verdict as an error message."""
    return f"of {world_size} processes, {verdict}; fix what its own output reports, then rerun the command"
