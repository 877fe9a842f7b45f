"""Where the launch's store listens, and the messages about ranks that do not join."""

import os
import socket
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from common.colossal import rendezvous
from common.colossal.rendezvous import open_store
from common.errors import UserError
from common.testing.ranks import free_port, run_ranks

TIMEOUT = 1.0


def meet(world_size: int, absent: int) -> tuple[str, float]:
    """Return what this rank says, and how many seconds it took."""
    rank, started = int(os.environ["RANK"]), time.monotonic()
    if rank == absent:
        return "", 0.0
    with pytest.raises(UserError) as caught:
        open_store(rank, world_size, "127.0.0.1", int(os.environ["MASTER_PORT"]), TIMEOUT)
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - started


def test_a_rank_that_does_not_come_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    for message, seconds in run_ranks(3, meet, 4, 1)[::2]:
        assert message.startswith("UserError: rank 1, 3 of 4 processes did not start within 1 s (TIMEOUT)")
        assert seconds < 3
    assert capfd.readouterr().err == ""  # PyTorch's own wait prints C++ stacks


def test_rank_0_that_does_not_come_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    message, seconds = run_ranks(2, meet, 2, 0)[1]
    port = message.partition("--port=")[2].partition(":")[0]
    assert message.startswith(f"RankError: --host=127.0.0.1 --port={port}: rank 0 was not found there within 1 s")
    assert seconds < 2
    assert capfd.readouterr().err == ""


def choose_backend(*backends: str) -> str:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with pytest.raises(UserError) as caught:
        open_store(rank, world_size, "127.0.0.1", int(os.environ["MASTER_PORT"]), 60.0, backends[rank])
    return str(caught.value)


def test_a_rank_without_a_gpu_among_others_is_named() -> None:
    for message in run_ranks(3, choose_backend, "nccl", "gloo", "nccl"):
        assert message.startswith(
            "rank 1 of 3 processes would use gloo on CPUs, the others nccl: check with nvidia-smi"
        )


def listening_addresses() -> set[str]:
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    place = {"rank": rank, "world_size": 2, "timeout": timedelta(seconds=30)}
    dist.init_process_group("gloo", store=open_store(rank, 2, "127.0.0.1", port, 30.0), **place)
    dist.barrier()
    try:
        connections = psutil.Process().net_connections()
        return {place.laddr.ip for place in connections if place.status == psutil.CONN_LISTEN}
    finally:
        dist.destroy_process_group()


def test_on_one_machine_everything_listens_on_the_loopback() -> None:
    assert run_ranks(2, listening_addresses) == [{"127.0.0.1"}] * 2  # PyTorch's own store: on all interfaces


def test_an_agent_of_torchrun_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(socket, "create_server", None)
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for number in range(2):  # the second attempt does not take the ranks of the first for its own
        for name, value in (environment | {"TORCHELASTIC_RESTART_COUNT": str(number)}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match="rank 1 of 2 processes did not start"):
            open_store(0, 2, "127.0.0.1", port, 0.2)
        agent.set(f"attempt {number}/here/1", "gloo ")
        agent.delete_key(f"attempt {number}/absent")
        assert open_store(0, 2, "127.0.0.1", port, 5).check(["here/0"])


@pytest.mark.parametrize(
    ("host", "resolved", "expected"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("node0", "127.0.1.1", ""),  # as Debian's /etc/hosts has it: the other nodes see another address
        ("node0", "192.0.2.1", ""),  # of no machine at all: as behind NAT
    ],
)
def test_no_more_addresses_than_needed_are_bound(host, resolved, expected, monkeypatch):
    if resolved:
        answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    assert rendezvous.address_to_bind(host) == (socket.AF_INET, expected)


def test_a_host_without_an_address_is_named():
    with pytest.raises(UserError, match="--host=node0.invalid cannot be resolved"):
        rendezvous.address_to_bind("node0.invalid")
