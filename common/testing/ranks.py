"""A launched process, or several ranks, within a test."""

import multiprocessing
import os
import pickle
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch

from common.engine.groups import join_groups, shutdown
from common.testing.commands import import_once

slow = partial(pytest.param, marks=pytest.mark.slow)
PLACE = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}


@contextmanager
def launched(**config: Any) -> Iterator[None]:
    """Launch with ``config`` inside the context, as a rank of `run_ranks` or a single process."""
    rank, size, port = (int(os.environ.get(name, default)) for name, default in PLACE.items())
    backend = os.environ.get("TEST_BACKEND", "gloo")
    join_groups(config, rank, size, "127.0.0.1", port, backend, verbose=False)
    try:
        yield
    finally:
        shutdown()


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return ``[function(*args) of rank 0, of rank 1, ...]``, each run in a forked process.

    Processes are forked so that they need not import torch, with the environment that torchrun
    would set. Raises RuntimeError with the traceback of a rank that fails, TimeoutError after 240
    s. All processes are gone on return. The caller must not have used CUDA.
    """
    import_once()
    context = multiprocessing.get_context("fork")
    port = free_port()
    work = partial(function, *args)
    processes = []
    pending = {}
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run_rank, args=(sender, rank, world_size, port, work))
            process.start()
            sender.close()
            processes.append(process)
            pending[receiver] = rank
        return _collect(pending)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def _run_rank(
    sender: Connection, rank: int, world_size: int, port: int, work: Callable[[], Any]
) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMIX_"))]:
        del os.environ[name]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    # A line at a time: pytest's stdout writes each argument of print() by itself, and the ranks'
    # lines would be mixed.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        answer = (work(), None)
    except BaseException:
        answer = (None, traceback.format_exc())
    sys.stdout.flush()
    sender.send_bytes(
        pickle.dumps(answer)
    )  # pickled by value: send() would share the tensors' memory with a process that ends


def _collect(pending: dict[Connection, int]) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + 240
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"no answer in time from ranks {sorted(pending.values())}")
        for receiver in ready:
            rank = pending.pop(receiver)
            try:
                results[rank], error = pickle.loads(receiver.recv_bytes())
            except EOFError:
                error = "died without an answer"
            if error:
                raise RuntimeError(f"rank {rank}: {error}")
    return [results[rank] for rank in sorted(results)]


def free_port() -> int:
    """Return a free port of the loopback interface, which connections of other tests do not get."""
    while True:
        # Linux gives ports from 32,768 on to whoever asks for any, as gloo does.
        port = secrets.choice(range(20_000, 32_768))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
