"""What each rank is doing, told to the others as it goes; and, once one is lost, which one, and what it was doing.

Every rank sends a datagram to rank 0 at every beat, and gets back what rank 0 is doing. Who falls silent is gone; who
still speaks, but does not notice what all others notice, hangs. PyTorch's store does not serve for this: where the
process that keeps it stops, its calls do not return.
"""

import faulthandler
import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from common.colossal.rendezvous import address_to_bind

SILENT = 3  # beats after which a rank is gone, once another has noticed
HANGING = 5  # beats in which all others of the ranks have noticed too
LEAVING = 2  # beats in which a rank hears why the run ends

_doing = "starting"
_changes = 0


def doing(what: str) -> None:
    """Say what this process does from now on; others read it where they wait for it for nothing."""
    global _doing, _changes
    _doing, _changes = what, _changes + 1


def progress() -> int:
    """Return a number that changes with what this process does."""
    return _changes


def beat_of(timeout: float) -> float:
    """Return the seconds between two beats: so many that a loss is named well within a tenth of a long timeout."""
    return min(2.0, timeout / 40)


def patience_of(timeout: float) -> float:
    """Return how long a collective may wait, in seconds: what is left of ``timeout`` is for finding out who is lost."""
    return timeout - (HANGING + LEAVING + 1) * beat_of(timeout)


class Heartbeat:
    """Tells, listens and judges in a thread of its own; prints all stacks where this process makes no progress.

    ``verdict`` is set once it is known who is lost. Where the process is not waiting in `await_verdict` then, because
    it still computes or waits in a collective that cannot fail, it is ended with the verdict on stderr.
    """

    def __init__(self, rank: int, world_size: int, timeout: float):
        self.rank, self.world_size = rank, world_size
        self.timeout, self.beat, self.patience = timeout, beat_of(timeout), patience_of(timeout)
        self.state = "running"  # then "noticed" that another is lost, "failed" by itself, or "ended"
        self.heard: dict[int, tuple[float, str, str]] = {}  # of each rank: when, what it did, its state
        self.noticed_at = float("inf")
        self.verdict: str | None = None
        self.judged, self.closing = threading.Event(), threading.Event()
        self.socket: socket.socket | None = None
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self, store: dist.Store | None, host: str) -> None:
        """Start; a single process has no ``store`` and watches itself only."""
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
        self.heard = dict.fromkeys(range(self.world_size) if not self.rank else [0], (now, "starting", "running"))

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self.socket is None:
            self._loop()
        else:
            with self.socket:
                self._loop()

    def _loop(self) -> None:
        seen = -1
        while not self.closing.is_set():
            if seen != _changes:
                seen = _changes
                faulthandler.dump_traceback_later(self.timeout, file=sys.__stderr__)
            if self.socket is None:
                self.closing.wait(self.beat)
                continue
            began = time.monotonic()
            self._exchange(began + self.beat)
            stood_still = time.monotonic() - began - self.beat
            if stood_still > self.beat:  # this process itself: nobody was silent for so long
                self.heard = {rank: (when + stood_still, *words) for rank, (when, *words) in self.heard.items()}
            if self.verdict is None and not self.closing.is_set():
                self.verdict = self._judge(time.monotonic())
            if self.verdict is not None:
                self._end()
                return

    def _exchange(self, until: float) -> None:
        """Tell what this rank does, and listen until the next beat."""
        if self.rank:
            with suppress(OSError):  # a server that is gone refuses
                self.socket.send(self._message())
        while (left := until - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                data, sender = self.socket.recvfrom(4096)
            except OSError:  # nothing more in this beat, or refused
                self.closing.wait(max(0.0, min(left, until - time.monotonic())))
                return
            with suppress(OSError, ValueError, KeyError, TypeError):  # whoever may have sent that
                self._hear(json.loads(data), sender)

    def _message(self) -> bytes:
        words = {"token": self.token, "rank": self.rank, "doing": _doing[:500], "state": self.state}
        return json.dumps(words | {"verdict": self.verdict}).encode()

    def _hear(self, words: dict[str, Any], sender: Any) -> None:
        if words["token"] != self.token or words["rank"] not in self.heard:
            return
        self.heard[words["rank"]] = (time.monotonic(), words["doing"], words["state"])
        if self.rank == 0:
            self.socket.sendto(self._message(), sender)
        elif words["verdict"]:
            self.verdict = words["verdict"]

    def _judge(self, now: float) -> str | None:
        """Return who is lost and what it was doing; "" if the ranks have lost contact and all are there; else None."""
        if self.rank == 0:
            self.heard[0] = (now, _doing, self.state)
        running = {rank: words for rank, words in self.heard.items() if words[2] in ("running", "failed")}
        if any(state == "noticed" for _, _, state in self.heard.values()) or self.state == "noticed":
            self.noticed_at = min(self.noticed_at, now)
        limit = SILENT * self.beat if self.noticed_at <= now else self.patience
        silent = {rank: words for rank, words in running.items() if now - words[0] > limit}
        if silent:
            return "; ".join(f"rank {rank} is gone; last seen: {what}" for rank, (_, what, _) in silent.items())
        if self.rank == 0 and now - self.noticed_at > HANGING * self.beat:
            return "; ".join(f"rank {rank} hangs; it says: {what}" for rank, (_, what, _) in running.items())
        return None

    def _end(self) -> None:
        """Hand the verdict to the process that waits for it, and to the others; end the process if it does not wait."""
        self.judged.set()
        for _ in range(LEAVING):
            self._exchange(time.monotonic() + self.beat)
        if self.state == "running" and not self.closing.is_set():
            if f"rank {self.rank} hangs" in self.verdict:  # pyright: ignore[reportOperatorIssue]
                faulthandler.dump_traceback(file=sys.__stderr__)
            print(f"error: {describe(self.verdict, self.world_size)}", file=sys.__stderr__, flush=True)
            os._exit(2)

    # --- the process --------------------------------------------------------------------------------------------------

    def await_verdict(self) -> str:
        """Return who is lost, now that a collective has failed; "" if nobody is."""
        faulthandler.cancel_dump_traceback_later()
        self.state = "noticed"
        self.judged.wait((HANGING + SILENT) * self.beat)
        if self.rank == 0:
            self.thread.join(LEAVING * self.beat + 1)  # the others hear it from this process
        return self.verdict or ""

    def fail(self, words: str) -> None:
        """Tell the others ``words``, the last of this process."""
        doing(words)
        self.state = "failed"
        self.closing.wait(LEAVING * self.beat if self.world_size > 1 else 0)

    def close(self) -> None:
        """Leave; rank 0 stays until all others have left too or know that it has, but not for long."""
        failed, self.state = self.state != "running", "ended"
        if self.rank:
            with suppress(OSError):
                self.socket.send(self._message())
        elif not failed:
            deadline = time.monotonic() + HANGING * self.beat
            while time.monotonic() < deadline and any(self.heard[r][2] == "running" for r in range(1, self.world_size)):
                time.sleep(self.beat / 20)
        self.closing.set()
        faulthandler.cancel_dump_traceback_later()


def describe(verdict: str, world_size: int) -> str:
    """Return the verdict as a line for the user."""
    return f"of {world_size} processes, {verdict}; fix what its own output reports, then rerun the command"
