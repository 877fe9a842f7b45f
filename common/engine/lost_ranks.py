"""The store of a launch, and the ranks that are missing at its start or later."""

import atexit
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import psutil
import torch.distributed as dist

from common.engine.upstream import gpc
from common.errors import RankError, UserError
from common.files import fingerprint_of
from common.launchers import LAUNCHERS
from common.text import print_wrapped

POLL = 1.0  # seconds between two looks at the store
ANSWER = 5.0  # seconds within which a rank that lives answers in the store
LATE = 30.0  # seconds at the start after which the ranks that are missing are named
LOOPBACKS = ("127.", "::1", "localhost")  # how such addresses begin

_phase = "starting"
_changes = 0


def set_phase(phase: str) -> None:
    """Set the phase that this rank reports if a rank is lost; this counts as progress."""
    global _phase, _changes
    _phase = phase
    _changes += 1


def progress() -> int:
    """Return how often `set_phase` was called."""
    return _changes


class Watcher:
    """A thread that ends this process if a rank is lost, or after ``timeout`` seconds without
    progress.

    A rank whose collective fails, or that makes no progress, asks all ranks in the store of the
    launch. Their threads answer, whatever the processes wait for; a rank that does not answer is
    missing. Every rank then prints one line with the missing ranks and with its own phase, and
    its stacks if none is missing.
    """

    def __init__(self, rank: int, world_size: int, timeout: float):
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.state = "running"  # then "failed", by a collective, or "closed"
        self.verdict = ""
        self.woken = threading.Event()

    def start(self, store: dist.Store) -> None:
        """Start the thread, with a connection of its own: a wait on ``store`` blocks all who share
        it.
        """
        self.store = store.clone()
        self.thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self.thread.start()
        atexit.register(self.stop, "closed")  # a thread in C++ must not outlive the interpreter

    def stop(self, state: str) -> None:
        self.state = state
        self.woken.set()
        self.thread.join(ANSWER + 3 * POLL)

    def await_verdict(self, error: Exception) -> str:
        """Return the message about lost ranks after a failed collective; "" if its ``error`` says
        more.
        """
        self.stop("failed")
        if self.thread.is_alive():
            return self._describe("0")
        return self.verdict or (self._describe("") if "Timed out" in str(error) else "")

    def _run(self) -> None:
        seen, still = -1, 0.0  # the time in which the process is suspended does not count
        while self.state == "running" and still < self.timeout and not self._is_asked():
            self.woken.wait(POLL)
            seen, still = progress(), still + POLL if seen == progress() else 0.0
        if self.state == "closed":
            return
        missing = self._find_missing()
        self.verdict = self._describe(missing) if missing else ""
        if self.state == "running":  # else the main thread raises
            if not missing:
                faulthandler.dump_traceback()
            with suppress(OSError):  # stderr is closed
                os.write(2, f"error: {self._describe(missing)}\n".encode())
            os._exit(2)

    def _is_asked(self) -> bool:
        with suppress(RuntimeError):  # rank 0 has ended; collectives fail if it was needed
            return self.store.check(["asked"])
        return False

    def _find_missing(self) -> str:
        """Ask all ranks; return those that do not answer."""
        keys = [f"answer/{rank}" for rank in range(self.world_size)]
        try:
            self.store.set("asked", "")
            self.store.set(keys[self.rank], "")
            missing = _await_keys(self.store, keys, ANSWER, self.rank)
        except RuntimeError:
            return "0"
        time.sleep(2 * POLL if self.rank == 0 else 0)  # it may serve the store
        return missing

    def _describe(self, missing: str) -> str:
        lost = (
            f"rank {missing} is missing, see its output"
            if missing
            else f"one hangs (TIMEOUT={self.timeout:g})"
        )
        return (
            f"of {self.world_size} processes, {lost}; rank {self.rank} was at {_phase!r}; rerun "
            "the command to resume"
        )


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Turn the error of a failed collective into a `UserError` that names the lost ranks.

    A collective on CPUs fails at once if a rank has died, and within the launch's ``timeout`` if
    one hangs. NCCL's may wait forever: then the `Watcher` ends the process.
    """
    try:
        yield
    except Exception as error:
        if gpc.watcher is None:
            raise
        if dist.get_backend() == "nccl":  # its clean-up would wait for kernels that never end
            atexit.register(
                _exit
            )  # runs after all threads, such as the checkpoint writer, and the error's line
        is_lost_connection = (
            isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)
        )
        is_collectives = isinstance(error, RuntimeError) and is_lost_connection
        verdict = is_collectives and gpc.watcher.await_verdict(error)
        if not verdict:
            raise
        raise UserError(verdict) from error


def _exit() -> None:
    sys.stdout.flush()
    os._exit(
        1 if hasattr(sys, "last_value") else 2
    )  # which Python sets where it prints a traceback


def open_store(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    timeout: float,
    backend: str,
    shared: Mapping[str, str],
) -> dist.Store:
    """Return the launch's store once all ranks have joined; rank 0 or torchrun's agent serves it.

    If ``host`` is the loopback interface, rank 0 listens on that only (PyTorch: on all). Raises
    `UserError` without a host or port, with the ranks that do not join within ``timeout`` seconds,
    and with what differs in ``shared``; `RankError` if rank 0 is not there, or another run's.
    """
    address = f"--host={host} --port={port}"
    if not host or not 0 < (port or 0) < 2**16:
        raise UserError(f"{address}: set them to the first node, and a free port on it")
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in psutil.net_if_addrs():
            raise RankError(
                f"GLOO_SOCKET_IFNAME={name}: this host has no such interface, but "
                f"{', '.join(psutil.net_if_addrs())}"
            )
    host = host.strip("[]")  # of an IPv6 address in a URL
    try:
        own_address = _source_address(host)
    except (OSError, UnicodeError) as error:  # the latter for a name that no host can have
        raise RankError(f"{address}: {error}; give a name or address of rank 0's host") from error
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not has_agent
    options = {"timeout": timedelta(seconds=timeout), "wait_for_workers": False}
    late = threading.Timer(LATE, _say_late, ("0", world_size, f" at {address}"))
    late.daemon = True
    late.start()
    try:
        if serves:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            bound = host if host.startswith(LOOPBACKS) else ""
            takes_both = (
                family == socket.AF_INET6
            )  # the others may know an IPv4 address of this host
            server = socket.create_server((bound, port), family=family, dualstack_ipv6=takes_both)
            options["master_listen_fd"] = server.detach()
        store = dist.TCPStore(host, port, is_master=serves, **options)
        if has_agent:  # which may serve several attempts of the same run
            store = dist.PrefixStore(
                f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store
            )
        elif store.add(f"joined/{rank}", 1) > 1:
            raise RankError(
                f"{address}: rank {rank} of a run has joined there before; start another run on "
                "another port"
            )
        late.cancel()
        _meet(store, rank, world_size, timeout, backend, own_address, shared)
    except (OSError, dist.DistError) as error:
        why = (
            str(error).splitlines()[0]
            if serves
            else f"rank 0 was not found there within {timeout:g} s (TIMEOUT)"
        )
        raise RankError(f"{address}: {why}") from error
    except UserError:
        time.sleep(2 * POLL if rank == 0 else 0)  # it may serve the store
        raise
    finally:
        late.cancel()
    return store


def _meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    seconds: float,
    backend: str,
    address: str,
    shared: Mapping[str, str],
) -> None:
    """Wait for all ranks, check that backends and ``shared`` are the same, choose gloo's interface.

    gloo binds the interface with the route to the other processes, unless GLOO_SOCKET_IFNAME is
    set. PyTorch's default, the address of the host name, is 127.0.1.1 on Debian.
    """
    keys = [f"here/{other}" for other in range(world_size)]
    text = json.dumps(shared)
    store.set(f"shared/{rank}", text)
    store.set(keys[rank], f"{backend} {address} {fingerprint_of([text])}")
    if absent := _await_keys(store, keys, seconds, rank):
        raise UserError(
            f"rank {absent} of {world_size} processes did not start within {seconds:g} s (TIMEOUT)"
        )
    backends, addresses, digests = zip(
        *(words.decode().split(" ") for words in store.multi_get(keys)), strict=True
    )
    if len(set(backends)) > 1:  # their groups would wait for each other until the timeout
        on_cpu = ", ".join(str(other) for other, name in enumerate(backends) if name == "gloo")
        raise UserError(
            f"torch finds no GPU on rank {on_cpu}: check nvidia-smi there, or start all with "
            "--backend gloo"
        )
    for other, digest in enumerate(digests):
        if digest != digests[0]:
            first, its = (json.loads(store.get(f"shared/{number}")) for number in (0, other))
            differences = [
                f"{name}={its.get(name)} (rank 0: {value})"
                for name, value in first.items()
                if its.get(name) != value
            ]
            raise UserError(
                f"rank {other} was started with {', '.join(differences[:3])}; all ranks of a run "
                "need the same, runs of one process each --world_size 1"
            )
    if address.startswith(
        LOOPBACKS
    ):  # this machine's /etc/hosts maps the name to it, or all processes are here
        address = next(
            (_source_address(other) for other in addresses if not other.startswith(LOOPBACKS)),
            address,
        )
    held = {one.address: name for name, ones in psutil.net_if_addrs().items() for one in ones}
    if address in held and not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = held[address]


def _await_keys(store: dist.Store, keys: list[str], seconds: float, rank: int) -> str:
    """Wait until the store has a key of each rank; return the ranks that set none within
    ``seconds``. After `LATE` seconds, rank 0, or all in its absence, print them.
    """
    start = time.monotonic()
    is_late = False
    while not store.check(keys):
        waited = time.monotonic() - start
        if waited > seconds or (waited > LATE and not is_late):
            is_late = True
            absent = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
            if waited > seconds:
                return absent
            if rank == 0 or absent.startswith("0"):
                _say_late(absent, len(keys))
        time.sleep(POLL / 20)
    return ""


def _say_late(absent: str, world_size: int, where: str = "") -> None:
    line = f"waiting for rank {absent} of {world_size} processes{where}, for {LATE:g} s so far"
    for names in LAUNCHERS.values():
        if os.environ.get(names.rank) and os.environ.get(names.world_size):
            line += f"; {names.rank} and {names.world_size} are set, --world_size 1 overrules them"
            break
    print_wrapped(line, is_warning=True)


def _source_address(host: str) -> str:
    """Return this machine's source address for packets to ``host``; sends nothing."""
    family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
