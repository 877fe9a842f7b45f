"""The rendezvous store of a launch, and the address it binds."""

import ipaddress
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import psutil
import torch.distributed as dist

from common.errors import RankError, UserError

DEFAULT_TIMEOUT = 1800.0  # seconds; PyTorch's own, for gloo
POLL = 0.05  # seconds; PyTorch's own wait takes up to twice its timeout and prints C++ stacks


def open_store(rank: int, world_size: int, host: str, port: int, timeout: float, backend: str = "gloo") -> dist.Store:
    """Return the launch's store once all ranks have joined; rank 0 or torchrun's agent serves it.

    The server listens only on the address of ``host`` (PyTorch: on all interfaces); if that is the loopback, so do
    gloo and NCCL. Otherwise gloo binds the interface with the route to the other processes, unless GLOO_SOCKET_IFNAME
    is set; PyTorch's default, the address of the host name, is 127.0.1.1 on Debian. Raises `UserError` listing the
    ranks that do not join within ``timeout`` seconds, or whose ``backend`` is not the others'; `RankError` if rank 0
    does not join.
    """
    if is_loopback(host):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
    serves = rank == 0 and not _agent_serves(host, port)
    if not serves:
        _await_server(host, port, timeout)
    listener = None
    if serves:
        family, address = address_to_bind(host)
        listener = socket.create_server((address, port), family=family).detach()
    options = {"timeout": timedelta(seconds=timeout), "wait_for_workers": False, "master_listen_fd": listener}
    store = dist.TCPStore(host, port, is_master=serves, **options)
    # an agent may serve several attempts of the same run
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    mine = _source_address(host)
    _await_ranks(store, rank, world_size, timeout, f"{backend} {mine}")
    held = store.multi_get([f"here/{other}" for other in range(world_size)])
    backends, others = zip(*(words.decode().split(" ") for words in held), strict=True)
    _check_backends(backends, rank)
    if is_loopback(mine):  # either this machine's /etc/hosts maps the name to it, or all processes are here
        mine = next((_source_address(other) for other in others if other and not is_loopback(other)), mine)
    if interface := _interface_of(mine):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return store


def _source_address(host: str) -> str:
    """Return this machine's source address for packets to ``host``, "" if there is none; sends nothing."""
    with suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


def _interface_of(address: str) -> str | None:
    places = psutil.net_if_addrs().items()
    return next((name for name, held in places if address in {one.address.partition("%")[0] for one in held}), None)


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
        f"--host={host} --port={port}: rank 0 was not found there within {seconds:g} s (TIMEOUT); is it running there?"
    )


def _await_ranks(store: dist.Store, rank: int, world_size: int, seconds: float, words: str) -> None:
    store.set(f"here/{rank}", words)
    absent = list(range(world_size))
    deadline = time.monotonic() + seconds
    while absent := [other for other in absent if not store.check([f"here/{other}"])]:
        if time.monotonic() > deadline:
            store.set("absent", ", ".join(map(str, absent)))
        if store.check(["absent"]):
            names = store.get("absent").decode()
            time.sleep(20 * POLL if rank == 0 else 0)  # let the others read it: the store closes when rank 0 exits
            raise UserError(
                f"rank {names} of {world_size} processes did not start within {seconds:g} s (TIMEOUT): check its "
                "output, and that it was started"
            )
        time.sleep(POLL)


def _check_backends(backends: Sequence[str], rank: int) -> None:
    """Raise `UserError` if the ranks chose different ones: their groups would wait for each other until the timeout."""
    on_cpu = [number for number, backend in enumerate(backends) if backend == "gloo"]
    if 0 < len(on_cpu) < len(backends):
        time.sleep(20 * POLL if rank == 0 else 0)  # as in `_await_ranks`
        raise UserError(
            f"rank {', '.join(map(str, on_cpu))} of {len(backends)} processes would use gloo on CPUs, the others nccl: "
            "check with nvidia-smi why torch finds no GPU there, or start all with --backend gloo"
        )


def address_to_bind(host: str) -> tuple[socket.AddressFamily, str]:
    """Return (family, address) to bind so that the other ranks can reach this machine as ``host``.

    The address is "" (all interfaces) if this machine does not have the address of ``host`` (behind NAT), or if it is a
    loopback address that only this machine maps to the name (/etc/hosts).
    """
    try:
        family, *_, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UserError(f"--host={host} cannot be resolved ({error.strerror}): pass its address") from error
    if is_loopback(address) and not is_loopback(host):
        return socket.AF_INET, ""
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return socket.AF_INET, ""
    return family, str(address)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address or "localhost", so that all processes run on this machine."""
    with suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
