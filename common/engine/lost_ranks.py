"""The store of a launch, and the ranks that are missing at its start or later."""

import atexit
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

from common.engine.upstream import gpc
from common.errors import RankError, UserError
from common.files import fingerprint_of
from common.launchers import LAUNCHERS
from common.process import set_variable
from common.text import print_wrapped

POLL = 1.0  # seconds between two looks at the store
ANSWER = 5.0  # seconds within which a rank that lives answers in the store
LATE = 30.0  # seconds at the start after which the ranks that are missing are named
LOOPBACKS = ("127.", "::1", "localhost")  # how such addresses begin

_activity = "starting"
_changes = 0


def set_activity(activity: str) -> None:
    """Set the activity that this rank reports if a rank is lost; this counts as progress."""
    global _activity, _changes
    _activity = activity
    _changes += 1


def progress() -> int:
    """Return how often `set_activity` was called."""
    return _changes


class Watcher:
    """A thread that ends this process if a rank is lost, or if it makes no progress.

    A rank whose collective fails, or that makes no progress, asks all ranks in the store of the
    launch. Their threads answer, whatever the processes wait for; a rank that does not answer is
    missing. Every rank then prints one line with the missing ranks and with its own activity, and
    its stacks if none is missing.
    """

    def __init__(self, rank: int, world_size: int, timeout: float):
        """Watch one rank; ``timeout``: seconds without progress after which it is lost."""
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.state = "running"  # later "failed" (a collective has) or "closed"
        self.verdict = ""
        self.woken = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self, store: dist.Store) -> None:
        """Start the thread."""
        # A connection of its own: a wait on ``store`` blocks all threads that use it.
        self.store = store.clone()
        self.thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self.thread.start()
        atexit.register(self.stop, "closed")  # A thread in C++ must not outlive the interpreter.

    def stop(self, state: str) -> None:
        """End the thread, if it was started."""
        atexit.unregister(self.stop)
        self.state = state
        self.woken.set()
        if self.thread:
            self.thread.join(ANSWER + 3 * POLL)

    def await_verdict(self, error: Exception) -> str:
        """Return the line about lost ranks after a failed collective; "" if ``error`` says more."""
        self.stop("failed")
        if self.thread and self.thread.is_alive():
            # The thread still waits for the store, which rank 0 serves.
            return self._describe("0")
        return self.verdict or (self._describe("") if "Timed out" in str(error) else "")

    def _run(self) -> None:
        """Wait until a rank is lost or the run is closed; report, and end the process."""
        seen = -1
        idle = 0.0  # counted, not timed: a suspended process is not at fault
        while self.state == "running" and idle < self.timeout and not self._is_asked():
            self.woken.wait(POLL)
            now = progress()
            idle = idle + POLL if seen == now else 0.0
            seen = now
        if self.state == "closed":
            return
        missing = self._find_missing()
        self.verdict = self._describe(missing) if missing else ""
        # In any other state the main thread raises.
        if self.state == "running":
            if not missing:
                faulthandler.dump_traceback()
            with suppress(OSError):  # stderr may be closed
                os.write(2, f"error: {self._describe(missing)}\n".encode())
            # sys.exit would not end the main thread, which may wait in C++ forever.
            os._exit(2)

    def _is_asked(self) -> bool:
        # Fails if rank 0 has ended. Collectives fail too, if it was needed.
        with suppress(RuntimeError):
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
        if self.rank == 0:
            # Rank 0 may serve the store, and the others have to find the answers there.
            time.sleep(2 * POLL)
        return missing

    def _describe(self, missing: str) -> str:
        """Return the line for the user; ``missing`` is "" if all ranks answered."""
        lost = f"one hangs (TIMEOUT={self.timeout:g})"
        if missing:
            lost = f"rank {missing} is missing, see its output"
        return (
            f"of {self.world_size} processes, {lost}; rank {self.rank} was at {_activity!r}; rerun "
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
        if dist.get_backend() == "nccl":
            # Its clean-up would wait for kernels that never end. The function runs after the
            # error's line and all threads, such as the checkpoint writer.
            atexit.register(_exit)
        is_lost_connection = (
            isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)
        )
        is_collectives = isinstance(error, RuntimeError) and is_lost_connection
        verdict = is_collectives and gpc.watcher.await_verdict(error)
        if not verdict:
            raise
        raise UserError(verdict) from error


def _exit() -> None:
    """End the process at once, with the status that it would have."""
    sys.stdout.flush()
    # Python sets `last_value` when it prints a traceback.
    os._exit(1 if hasattr(sys, "last_value") else 2)


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

    Raises:
        UserError: without a host or port, with the ranks that do not join within ``timeout``
            seconds, and with what differs in ``shared``.
        RankError: if rank 0 is not there, or another run's.
    """
    address = f"--host={host} --port={port}"
    if not host or not 0 < (port or 0) < 2**16:
        raise UserError(f"{address}: set them to the first node, and a free port on it")
    host = host.strip("[]")  # an IPv6 address may be written as in a URL
    try:
        own_address = _source_address(host)
    # UnicodeError: a name that no host can have.
    except (OSError, UnicodeError) as error:
        raise RankError(f"{address}: {error}; give a name or address of rank 0's host") from error
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not has_agent
    late = threading.Timer(LATE, _say_late, ("0", world_size, f" at {address}"))
    late.daemon = True
    late.start()
    try:
        store: dist.Store = _connect(host, port, serves, timeout)
        if has_agent:
            # The agent may serve several attempts of the same run.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
            store = dist.PrefixStore(f"attempt {attempt}", store)
        else:
            _check_run(store, rank, world_size, address)
        late.cancel()
        _meet(store, rank, world_size, timeout, backend, own_address, shared)
    except (OSError, dist.DistError) as error:
        why = f"rank 0 was not found there within {timeout:g} s (TIMEOUT)"
        if serves:
            why = str(error).splitlines()[0]
        raise RankError(f"{address}: {why}") from error
    except UserError:
        if rank == 0:
            # Rank 0 may serve the store, and the others have to find their answers there.
            time.sleep(2 * POLL)
        raise
    finally:
        late.cancel()
    return store


def _check_run(store: dist.Store, rank: int, world_size: int, address: str) -> None:
    """Raise `RankError` if the store is that of another run, which must not notice."""
    if rank == 0:
        store.set("size", str(world_size))
    size = int(store.get("size"))
    if size != world_size or store.add(f"joined/{rank}", 1) > 1:
        raise RankError(
            f"{address}: rank {rank} of {world_size} does not belong to the run of {size} "
            "processes there, or has joined it before; start another run on another port"
        )


def check_interfaces() -> None:
    """Raise `RankError` if GLOO_SOCKET_IFNAME names an interface that this host lacks."""
    interfaces = psutil.net_if_addrs()
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in interfaces:
            raise RankError(
                f"GLOO_SOCKET_IFNAME={name}: this host has no such interface, but "
                f"{', '.join(interfaces)}"
            )


def _connect(host: str, port: int, serves: bool, timeout: float) -> dist.TCPStore:
    """Return a connection to the store, which this process ``serves`` or another.

    If ``host`` is the loopback interface, it listens on that only (PyTorch: on all).
    """
    options: dict[str, Any] = {}
    if serves:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = host if host.startswith(LOOPBACKS) else ""
        # The others may know an IPv4 address of this host.
        takes_both = family == socket.AF_INET6
        server = socket.create_server((bound, port), family=family, dualstack_ipv6=takes_both)
        options["master_listen_fd"] = server.detach()
    return dist.TCPStore(
        host,
        port,
        is_master=serves,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        **options,
    )


def _meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    seconds: float,
    backend: str,
    own_address: str,
    shared: Mapping[str, str],
) -> None:
    """Wait for all ranks, check that backends and ``shared`` are equal, choose gloo's interface."""
    keys = [f"here/{other}" for other in range(world_size)]
    text = json.dumps(shared)
    # Each rank reads all digests, but only a message needs two of the texts.
    store.set(f"shared/{rank}", text)
    store.set(keys[rank], f"{backend} {own_address} {fingerprint_of([text])}")
    absent = _await_keys(store, keys, seconds, rank)
    if absent:
        raise UserError(
            f"rank {absent} of {world_size} processes did not start within {seconds:g} s (TIMEOUT)"
        )
    answers = [words.decode().split(" ") for words in store.multi_get(keys)]
    backends, addresses, digests = zip(*answers, strict=True)
    # Groups of different backends would wait for each other until the timeout.
    if len(set(backends)) > 1:
        on_cpu = ", ".join(str(other) for other, name in enumerate(backends) if name == "gloo")
        raise UserError(
            f"torch finds no GPU on rank {on_cpu}: check nvidia-smi there, or start all with "
            "--backend gloo"
        )
    for other, digest in enumerate(digests):
        if digest != digests[0]:
            _raise_difference(store, other)
    _choose_interface(own_address, addresses)


def _raise_difference(store: dist.Store, rank: int) -> NoReturn:
    """Raise `UserError` with what differs between ``rank`` and rank 0."""
    first = json.loads(store.get("shared/0"))
    other = json.loads(store.get(f"shared/{rank}"))
    differences = [
        f"{name}={other.get(name)} (rank 0: {value})"
        for name, value in first.items()
        if other.get(name) != value
    ]
    raise UserError(
        f"rank {rank} was started with {', '.join(differences[:3])}; all ranks of a run need the "
        "same, runs of one process each --world_size 1"
    )


def _choose_interface(own_address: str, addresses: Iterable[str]) -> None:
    """Let gloo bind the interface with the route to the other processes.

    PyTorch's default, the address of the host name, is 127.0.1.1 on Debian.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    if own_address.startswith(LOOPBACKS):
        # /etc/hosts may map the host's name to a loopback address, which others cannot reach. Where
        # all processes are on this machine, the address is right.
        elsewhere = [other for other in addresses if not other.startswith(LOOPBACKS)]
        if elsewhere:
            own_address = _source_address(elsewhere[0])
    for name, items in psutil.net_if_addrs().items():
        if own_address in [item.address for item in items]:
            set_variable("GLOO_SOCKET_IFNAME", name)


def _await_keys(store: dist.Store, keys: list[str], seconds: float, rank: int) -> str:
    """Wait until the store has a key of each rank; return the ranks that set none in ``seconds``.

    After `LATE` seconds, rank 0, or all in its absence, print them.
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
    """Print which ranks are late, and which variables may have made this process wait for them."""
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
