"""The key-value store through which the processes of a launch find each other, and where it listens."""

import ipaddress
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from common.errors import RankError, UserError

DEFAULT_TIMEOUT = 1800.0  # seconds; PyTorch's own, for gloo
POLL = 0.05  # seconds; PyTorch's own waiting takes up to twice its timeout, and prints the stack of its C++ code


def open_store(rank: int, world_size: int, host: str, port: int, timeout: float) -> dist.Store:
    """Return the launch's store, once all ranks are there.

    Rank 0 serves it, except under torchrun, whose agent does. PyTorch's server listens on all interfaces; this one on
    the address that ``host`` stands for. Where that is the loopback, gloo and NCCL are told to listen there too; else
    they listen on the interface of the node's name.

    Raises `UserError` naming the ranks that do not come within ``timeout`` seconds; where that is rank 0, `RankError`.
    """
    if is_loopback(host):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
    serves = rank == 0 and not _agent_serves(host, port)
    if not serves:
        _await_server(host, port, timeout)
    listener = listen(host, port).detach() if serves else None
    options = {"timeout": timedelta(seconds=timeout), "wait_for_workers": False, "master_listen_fd": listener}
    store = dist.TCPStore(host, port, is_master=serves, **options)
    # an agent may serve several attempts of the same run, one after the other
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    _await_ranks(store, rank, world_size, timeout)
    return store


def _agent_serves(host: str, port: int) -> bool:
    environ = os.environ
    is_agents = (environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")) == (host, str(port))
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and is_agents


def _await_server(host: str, port: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        with suppress(OSError), socket.create_connection((host, port), min(left, 5.0)):
            return
        time.sleep(POLL)
    raise RankError(
        f"--host={host} --port={port}: rank 0 was not found there within {seconds:g} s (TIMEOUT); does it run there?"
    )


def _await_ranks(store: dist.Store, rank: int, world_size: int, seconds: float) -> None:
    store.set(f"here/{rank}", "")
    absent = list(range(world_size))
    deadline = time.monotonic() + seconds
    while absent := [other for other in absent if not store.check([f"here/{other}"])]:
        if time.monotonic() > deadline:
            store.set("absent", ", ".join(map(str, absent)))
        if store.check(["absent"]):
            names = store.get("absent").decode()
            time.sleep(20 * POLL if rank == 0 else 0)  # for the others to read it: rank 0 takes the store with it
            raise UserError(
                f"rank {names} of {world_size} processes did not start within {seconds:g} s (TIMEOUT): does its own "
                "output say why, and was one started forevery rank?"
            )
        time.sleep(POLL)


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
    return family, address  # pyright: ignore[reportReturnType]


def is_loopback(host: str) -> bool:
    """Return whether ``host`` says by itself that all processes run on this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
