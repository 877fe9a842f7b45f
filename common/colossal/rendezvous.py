"""Where the processes of a run meet: at the port that was given, or at a free one that they agree on."""

import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from common.errors import RankError, UserError

PORTS = 16  # how many are looked through
PATIENCE = 2.0  # seconds that one connection may take
LONGEST = 256  # bytes that are read of an answer


@contextmanager
def given_port(host: str, port: int) -> Iterator[int]:
    """Yield ``port``; raise `UserError` when rank 0, inside the context, finds it in use."""
    try:
        yield port
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise UserError(f"--port={port} is in use on {host}: choose another") from error


@contextmanager
def agreed_port(run: str, rank: int, host: str, first: int, timeout: float) -> Iterator[int]:
    """Yield the port that rank 0 is to listen on, the same in every process of ``run`` and free when it was chosen.

    Inside the context, which is to last until all have joined, rank 0 tells it to whoever names ``run``, at the first
    free port from ``first`` on. The others ask at each port in turn: another program there, or another run, is passed
    over. Raises `UserError` when rank 0 is not found within ``timeout`` seconds, or finds no free port.
    """
    if rank:
        yield _ask(run, host, range(first, first + PORTS), timeout)
        return
    with _listen(host, range(first, first + PORTS)) as listener:
        port = listener.getsockname()[1] + PORTS  # of two runs that look at the same time, each finds another
        with _listen(host, range(port, port + PORTS)) as free:
            port = free.getsockname()[1]
        teller = threading.Thread(target=_tell, args=(listener, run, port), daemon=True)
        teller.start()
        try:
            yield port
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # close() alone would not end a waiting accept()
            teller.join()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at ``port`` of the address that ``host`` stands for, and of no other."""
    family, address = address_to_bind(host)
    return socket.create_server((address, port), family=family)


def address_to_bind(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the address of this machine at which the others find ``host``, to listen on no other of its addresses.

    It is empty, for all of them, where ``host`` stands for an address that this machine does not have (behind NAT), or
    for one that only this machine sees (a name that /etc/hosts maps to the loopback).
    """
    try:
        family, *_, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UserError(f"--host={host} cannot be resolved ({error.strerror}): give its address") from error
    if ipaddress.ip_address(address).is_loopback and not is_loopback(host):
        return socket.AF_INET, ""
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return socket.AF_INET, ""
    return family, address


def is_loopback(host: str) -> bool:
    """Return whether ``host`` says by itself that all processes run on this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _listen(host: str, ports: range) -> socket.socket:
    for port in ports:
        try:
            return listen(host, port)
        except OSError:
            continue
    raise UserError(f"ports {ports[0]} to {ports[-1]} are all in use: choose another with --port")


def _tell(listener: socket.socket, run: str, port: int) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # shut down
            return
        with connection, suppress(OSError):
            connection.settimeout(PATIENCE)
            if _read_line(connection) == run:
                connection.sendall(f"{run} {port}\n".encode())


def _ask(run: str, host: str, ports: range, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for port in ports:
            with suppress(OSError), socket.create_connection((host, port), PATIENCE) as connection:
                connection.sendall(f"{run}\n".encode())
                name, _, answer = _read_line(connection).rpartition(" ")
                if name == run and answer.isdecimal():
                    return int(answer)
        time.sleep(0.1)
    raise RankError(
        f"--host={host}: rank 0 was not found there at ports {ports[0]} to {ports[-1]} within {timeout:.0f} s; "
        "does it run there? --port says where it is to listen"
    )


def _read_line(connection: socket.socket) -> str:
    with connection.makefile("rb") as lines:
        return lines.readline(LONGEST).decode(errors="replace").rstrip("\n")
