"""Process groups and random state: Colossal-AI's parallel context, repaired."""

import os
import random
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.engine.lost_ranks import Watcher, check_interfaces, open_store
from common.engine.tensor_parallel.layout import resolve_parallel
from common.engine.upstream import (
    Config,
    ParallelContext,
    ParallelMode,
    auto_set_accelerator,
    gpc,
    tensor_parallel_env,
    upstream_launch,
)
from common.errors import UserError

DATA_PARALLEL_SEED_STRIDE = 2**20  # large: no rank's seed of SEED is one of SEED + 1
DEFAULT_TIMEOUT = 1800.0  # seconds; PyTorch's own, for gloo
# seconds after TIMEOUT at which NCCL's watchdog aborts the process, without naming a rank
NCCL_GRACE = 120.0
_in_use = threading.Lock()  # held from `join_groups` to `shutdown`


class RepairedContext(ParallelContext):
    """Upstream's context, which starts, seeds and stops on CPUs and GPUs alike.

    Upstream's is `ParallelContext` (legacy/context/parallel_context.py).

    Attributes:
        watcher: names lost ranks; None without a timeout.
        shared: what must be the same on all ranks, by name.
        logits: how the last classifier of upstream's splits its output, see `upstream_layers`.
    """

    watcher: Watcher | None = None
    shared: Mapping[str, str] = {}
    logits: Any = None

    def timeout_of(self, backend: str) -> timedelta | None:
        """Return the timeout of a backend's collectives; None for PyTorch's default.

        NCCL's is longer than the launch's: it aborts the process before the watcher has named a
        rank.
        """
        if self.watcher is None:
            return None
        return timedelta(seconds=self.watcher.timeout + (0 if backend == "gloo" else NCCL_GRACE))

    def init_global_dist(
        self, rank: int, world_size: int, backend: str, host: str, port: int
    ) -> None:
        """Join the default process group; one process or a fake launch needs no host and port.

        Upstream (parallel_context.py:382) puts every host in brackets, which Python >= 3.11.4
        accepts for IPv6 only, and keeps the device found at import, which a forked process may not
        have.
        """
        auto_set_accelerator()
        if backend != "fake":
            # Gloo binds it for a single process too.
            check_interfaces()
        # There is no other process to meet.
        if world_size == 1 or backend == "fake":
            store: dist.Store = dist.HashStore()
        else:
            timeout = self.watcher.timeout if self.watcher else DEFAULT_TIMEOUT
            store = open_store(rank, world_size, host, port, timeout, backend, self.shared)
        if self.watcher is not None:
            self.watcher.start(store)
        self._excepthook = sys.excepthook  # PyTorch replaces it
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=self.timeout_of(backend),
        )
        ranks = list(range(world_size))
        # Python objects go over gloo: NCCL would send them through GPU memory.
        cpu_group = None
        if backend not in ("gloo", "fake"):
            cpu_group = dist.new_group(ranks, timeout=self.timeout_of("gloo"), backend="gloo")
        self._register_dist(
            rank, world_size, dist.GroupMember.WORLD, cpu_group, ranks, ParallelMode.GLOBAL
        )
        self.add_global_rank(ParallelMode.GLOBAL, rank)

    def init_parallel_groups(self) -> None:
        """Create the groups of ``parallel``, with the timeout, which groups do not inherit.

        Upstream (parallel_context.py:450) fills missing keys of ``parallel`` from the process's
        previous launch.
        """
        config: Any = self.config
        world_size = self.get_world_size(ParallelMode.GLOBAL)
        config.parallel = Config(resolve_parallel(config.get("parallel"), world_size))
        if config.parallel["tensor"]["mode"]:
            # Collectives of several groups are in flight at once (rows and columns, or tensor and
            # data): NCCL 2.26 and later then launches them in the order of the host, or GPUs that
            # start them in different orders wait for each other forever.
            os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        new_group = dist.new_group

        def with_timeout(ranks: list[int], backend: str | None = None) -> dist.ProcessGroup | int:
            return new_group(ranks, self.timeout_of(backend or dist.get_backend()), backend)

        # Upstream's initializers of groups call dist.new_group, each in its own file.
        with mock.patch.object(dist, "new_group", with_timeout):
            super().init_parallel_groups()

    def set_seed(self, seed: int) -> None:
        """Seed all generators.

        Upstream's seeds per parallel mode (parallel_context.py:550) are for its own layers.
        """
        random.seed(seed)
        np.random.seed(seed % 2**32)  # NumPy's seeds have 32 bits
        torch.manual_seed(seed)
        self._seed = seed

    def separate_data_parallel_seeds(self) -> None:
        """Use different dropout masks on each data-parallel rank; call it after the model is built.

        Upstream (parallel_context.py:551) uses the same masks on all data-parallel ranks.
        """
        device = torch.cuda if torch.cuda.is_available() else torch
        number = 1 + self.get_local_rank(ParallelMode.DATA)
        device.manual_seed(self._seed + DATA_PARALLEL_SEED_STRIDE * number)

    def destroy(self) -> None:
        """Leave all groups and reset the context for another launch.

        Upstream (parallel_context.py:514) keeps ranks and the layers' settings, and cannot leave
        the groups of a launch that has failed.
        """
        if self.watcher is not None:
            self.watcher.stop("closed")
        if dist.is_initialized():
            dist.destroy_process_group()
            sys.excepthook = self._excepthook
        self._groups.clear()
        # Back to its defaults: a later launch would find the sizes of this one.
        tensor_parallel_env.load()
        for table in (
            self._global_ranks,
            self._local_ranks,
            self._world_sizes,
            self._cpu_groups,
            self._ranks_in_group,
        ):
            table.clear()
        # A tool that runs after the training must not read its config.
        self._config = self.watcher = self.logits = None


# Upstream's modules have imported the object, so that it changes its class rather than its name.
gpc.__class__ = RepairedContext


def join_groups(
    config: Mapping[str, Any],
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
    timeout: float | None = None,
    shared: Mapping[str, str] | None = None,
) -> None:
    """Join the process groups, set device and seed, and put ``config`` into ``gpc.config``.

    Raises `UserError` where ranks differ in ``shared``, and before the `shutdown` of an earlier
    call. After ``timeout`` seconds without progress a rank reports the missing ones and ends;
    default: PyTorch's timeout (30 minutes for gloo), without a report.
    """
    if not _in_use.acquire(blocking=False):
        raise UserError(
            "this process trains or evaluates already: wait for its end, or start another process"
        )
    # Set first: the groups take the watcher's timeout.
    gpc.watcher = Watcher(rank, world_size, timeout) if timeout and world_size > 1 else None
    gpc.shared = shared or {}
    try:
        upstream_launch(
            dict(config), rank, world_size, host, port, backend, local_rank, seed, verbose
        )
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """Leave the process groups of the last launch, if any."""
    gpc.destroy()
    # Upstream's launch_from_torch and its kind do not hold it.
    if _in_use.locked():
        _in_use.release()


def generator_states() -> dict[str, Tensor]:
    """Return the states of torch's generators."""
    on_gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"torch": torch.get_rng_state()} | on_gpu


def set_generator_states(states: dict[str, Tensor]) -> None:
    """Restore states from `generator_states`."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
