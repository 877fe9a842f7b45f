"""A free port is agreed on, whatever else listens where it is looked for."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.colossal import rendezvous as meeting_point
from common.colossal.rendezvous import agreed_port
from common.errors import UserError

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr(meeting_point, "PATIENCE", 0.3)


@pytest.fixture
def first() -> int:
    """A port that is free now, as are its neighbours most likely."""
    with socket.create_server((HOST, 0)) as probe:
        return probe.getsockname()[1]


def meet(first: int, runs: dict[str, int]) -> dict[str, list[int]]:
    """Return the ports that the ranks of each run agree on; all start together, each rank 0 last."""
    everyone = sum(runs.values())
    joined = threading.Barrier(everyone)

    def member(run: str, rank: int) -> int:
        time.sleep(0 if rank else 0.3)
        with agreed_port(run, rank, HOST, first, timeout=20) as port:
            joined.wait(20)
            return port

    with ThreadPoolExecutor(everyone) as pool:
        ports = {run: [pool.submit(member, run, rank) for rank in range(size)] for run, size in runs.items()}
        return {run: [port.result() for port in found] for run, found in ports.items()}


def serve(server: socket.socket, behave: Callable[[socket.socket], object]) -> None:
    kept = []
    while True:
        try:
            kept.append(server.accept()[0])
            behave(kept[-1])
        except OSError:
            break
    for connection in kept:
        connection.close()


def test_all_ranks_agree_and_the_port_is_free(first):
    ports = set(meet(first, {"7.0": 4})["7.0"])
    assert len(ports) == 1
    socket.create_server((HOST, ports.pop())).close()


def test_two_runs_with_the_same_first_port_do_not_mix(first):
    ports = meet(first, {"7.0": 3, "8.0": 3})
    assert len(set(ports["7.0"])) == len(set(ports["8.0"])) == 1
    assert set(ports["7.0"]) != set(ports["8.0"])


@pytest.mark.parametrize(
    "behave",
    [
        lambda connection: None,
        lambda connection: connection.close(),
        lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
        lambda connection: connection.sendall(connection.recv(100)),
        lambda connection: connection.sendall(b"x" * 1000),
    ],
    ids=["silent", "closes", "greets", "echoes", "floods"],
)
def test_another_program_at_the_port_is_passed_over(behave):
    with socket.create_server((HOST, 0)) as server:
        taken = server.getsockname()[1]
        foreign = threading.Thread(target=serve, args=(server, behave))
        foreign.start()
        try:
            ports = set(meet(taken, {"7.0": 2})["7.0"])
        finally:
            server.shutdown(socket.SHUT_RDWR)
            foreign.join()
    assert len(ports) == 1
    assert ports.pop() > taken + 1


def test_a_missing_rank_0_is_named(first):
    with pytest.raises(UserError, match=f"--host={HOST}: rank 0 was not found there at ports {first} to {first + 15}"):
        agreed_port("7.0", 1, HOST, first, timeout=0.3).__enter__()


def test_no_free_port_is_said(monkeypatch):
    monkeypatch.setattr(meeting_point, "PORTS", 1)
    with socket.create_server((HOST, 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(UserError, match=f"ports {taken} to {taken} are all in use"):
            agreed_port("7.0", 0, HOST, taken, timeout=1).__enter__()


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
    assert meeting_point.address_to_bind(host) == (socket.AF_INET, expected)


def test_a_host_without_an_address_is_named():
    with pytest.raises(UserError, match="--host=node0.invalid cannot be resolved"):
        meeting_point.address_to_bind("node0.invalid")
