"""The stacks of a process that makes no progress, and whose messages count."""

import json
import socket
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from common.colossal import heartbeat
from common.colossal.heartbeat import Heard, Heartbeat, beat_of, doing, patience_of
from common.testing.ranks import run_ranks


@pytest.mark.parametrize("timeout", [1, 20, 600, 1e5])
def test_a_loss_is_named_within_the_timeout(timeout: float) -> None:
    beats = heartbeat.HANGING + heartbeat.LEAVING
    assert 0.8 * timeout <= patience_of(timeout) < timeout - beats * beat_of(timeout)
    assert patience_of(1e5) > 0.99e5


def busy() -> None:
    for _ in range(20):
        doing("something")
        time.sleep(0.1)


def stuck() -> None:
    time.sleep(1.5)


def busy_then_stuck() -> None:
    alone = Heartbeat(0, 1, timeout=1.0)
    alone.start(None, "")
    busy()
    stuck()
    alone.close()


def test_a_process_without_progress_prints_its_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(1, busy_then_stuck)
    printed = capfd.readouterr().err
    assert printed.count("Timeout (0:00:01)!") == 1
    assert "in stuck" in printed
    assert "in busy\n" not in printed


def hear_nobody() -> None:
    rank0 = Heartbeat(0, 2, timeout=1.0)
    rank0.start(dist.HashStore(), "127.0.0.1")
    time.sleep(1.5)
    started = time.monotonic()
    rank0.close()
    assert time.monotonic() - started < 0.1  # nobody who is waited for


def test_where_no_datagram_comes_nobody_is_blamed(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(1, hear_nobody)
    warning, *stacks = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: no datagram from rank 1 at UDP port ")
    assert stacks[0].startswith("Timeout")  # of this process, which does not report progress either


def test_who_stood_still_itself_does_not_blame_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rank1, clock = Heartbeat(1, 2, timeout=4.0), SimpleNamespace(now=0.0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock.now))
    rank1.heard = {0: Heard(0, 0.0, 0.0, "step 1")}
    for seconds, verdict in ((100.0, None), (rank1.beat, "rank 0 is gone; last seen: step 1")):  # first suspended
        monkeypatch.setattr(rank1, "_exchange", lambda _, seconds=seconds: setattr(clock, "now", clock.now + seconds))
        rank1._beat()
        assert rank1.verdict == verdict


def test_strangers_are_not_heard() -> None:
    store, rank0 = dist.HashStore(), Heartbeat(0, 2, timeout=600.0)
    rank0.start(store, "127.0.0.1")
    try:
        place = json.loads(store.get("heartbeat"))
        words = {"token": place["token"], "rank": 1, "doing": "mine", "state": "running"}
        words |= {"progress": 0, "waits_for_gpu": False, "verdict": None}
        lies = [{"token": "guessed"}, *({"rank": rank} for rank in (2, -1, "x", []))]
        strange = [b"", b"\xff", b"{}", b"[]", b"7"]
        strange += [json.dumps(words | {"doing": "theirs"} | lie).encode() for lie in lies]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
            peer.settimeout(5)
            peer.connect(("127.0.0.1", place["port"]))
            for message in strange:
                peer.send(message)
            peer.send(json.dumps(words).encode())
            assert json.loads(peer.recv(4096))["rank"] == 0
            assert rank0.heard[1][3:] == ("mine", "running", False, 0)
            peer.send(json.dumps(words | {"state": "ended"}).encode())
            peer.recv(4096)
    finally:
        started = time.monotonic()
        rank0.close()
    assert time.monotonic() - started < 5  # a rank that is missed is waited for 10 s


@pytest.mark.parametrize(
    ("waiting", "verdict"),
    [
        # by rank: whether it waits for its GPU, its progress
        ([(False, 9), (True, 7), (True, 8)], "rank 0 hangs; last seen: rank 0's work"),
        ([(False, 5), (False, 5), (True, 4)], "rank 0 hangs; last seen: rank 0's work; rank 1 hangs; last seen: rank"),
        ([(False, 5), (False, 4), (True, 3)], "rank 1 hangs; last seen: rank 1's work"),
        ([(True, 5), (True, 4), (True, 5)], "one GPU hangs, or NCCL between them: rank 0 waits for its GPU; last"),
        ([(False, 5), (False, 5), (False, 5)], None),
    ],
)
@pytest.mark.parametrize("noticed", [False, True])
def test_who_waits_for_a_gpu_is_not_blamed_for_being_behind(waiting, verdict, noticed, monkeypatch) -> None:
    """Without a failed collective, and after another rank has noticed one, where progress does not count."""
    rank0, long_ago = Heartbeat(0, 4, timeout=10.0), time.monotonic() - 100
    monkeypatch.setattr(rank0, "_waits_for_gpu", lambda: waiting[0][0])
    monkeypatch.setattr(heartbeat, "_doing", "rank 0's work")
    monkeypatch.setattr(heartbeat, "_changes", waiting[0][1])
    now = time.monotonic()
    rank0.heard = {
        rank: Heard(rank, now, long_ago, f"rank {rank}'s work", "running", *state) for rank, state in enumerate(waiting)
    }
    if noticed:
        rank0.heard[3], rank0.noticed_at = Heard(3, now, now, "rank 3's work", "noticed"), long_ago
        idle = [f"rank {rank} hangs; last seen: rank {rank}'s work" for rank, (gpu, _) in enumerate(waiting) if not gpu]
        verdict = "; ".join(idle) or verdict
    assert (rank0._judge(now) or "").startswith(verdict or "")
    assert verdict or rank0._judge(now) is None


class Stream:
    """The stream of a GPU that does not finish its work, or is broken."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def query(self) -> bool:
        if self.device.index == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.device.index == 2


def test_a_gpu_is_asked_only_without_progress_and_may_be_broken(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_stream", Stream)
    rank0 = Heartbeat(0, 1, timeout=10.0)
    waits = []
    for rank0.device in (None, *(torch.device("cuda", index) for index in range(3))):
        rank0.changed_at = time.monotonic()
        waits.append(rank0._waits_for_gpu())
        rank0.changed_at -= 10
        waits.append(rank0._waits_for_gpu())
    assert waits == [False, False, False, True, False, True, False, False]
