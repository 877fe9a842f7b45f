"""Process groups and random state: Colossal-AI's parallel context, repaired."""

import random
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from common.colossal.heartbeat import Heartbeat, patience_of
from common.colossal.import_stubs import replaced
from common.colossal.rendezvous import DEFAULT_TIMEOUT, open_store
from common.colossal.tensor_parallel.check import resolve_parallel
from common.colossal.upstream import (
    Config,
    ParallelContext,
    ParallelMode,
    SeedManager,
    auto_set_accelerator,
    gpc,
    random_state,
    tensor_parallel_env,
    upstream_launch,
)

DATA_PARALLEL_SEED_STRIDE = 2**20  # more than the seeds that one model's tensor and pipeline ranks take


class RepairedContext(ParallelContext):
    """`ParallelContext` (legacy/context/parallel_context.py) that starts, seeds and stops on CPUs and GPUs alike.

    Attributes:
        timeout: how long a collective may take; None for PyTorch's default.
        heartbeat: tells the other ranks what this one does, and finds out who is lost; None without a timeout.
    """

    timeout: timedelta | None = None
    heartbeat: Heartbeat | None = None

    def init_global_dist(self, rank: int, world_size: int, backend: str, host: str, port: int) -> None:
        """Join the default process group; a single process, and a simulated launch, need neither host nor port.

        Upstream (parallel_context.py:382) puts every host in brackets, which Python >= 3.11.4 refuses for anything but
        IPv6. It also keeps the device it found at the first import, which a forked process may not see.
        """
        auto_set_accelerator()
        patience = self.heartbeat.timeout if self.heartbeat else DEFAULT_TIMEOUT
        alone = world_size == 1 or backend == "fake"
        store = None if alone else open_store(rank, world_size, host, port, patience)
        if self.heartbeat is not None:
            self.heartbeat.start(store, host)
        place = {"rank": rank, "world_size": world_size, "timeout": self.timeout}
        dist.init_process_group(backend, store=store or dist.HashStore(), **place)
        ranks = list(range(world_size))
        cpu_group = None if backend in ("gloo", "fake") else dist.new_group(ranks, timeout=self.timeout, backend="gloo")
        self._register_dist(rank, world_size, dist.GroupMember.WORLD, cpu_group, ranks, ParallelMode.GLOBAL)
        self.add_global_rank(ParallelMode.GLOBAL, rank)

    def init_parallel_groups(self) -> None:
        """Make the groups that ``parallel`` asks for, with our ``timeout``, which groups do not inherit.

        Upstream (parallel_context.py:450) takes what ``parallel`` leaves out from the process's last launch.
        """
        world_size = self.get_world_size(ParallelMode.GLOBAL)
        self.config.parallel = Config(resolve_parallel(self.config.get("parallel"), world_size))
        with replaced(dist, "new_group", partial(dist.new_group, timeout=self.timeout)):
            super().init_parallel_groups()

    def set_seed(self, seed: int) -> None:
        """Seed every generator, and register the data- and tensor-parallel seeds, on CPUs too.

        Upstream (parallel_context.py:550) registers them on GPUs only; without them tensor-parallel layers raise
        KeyError.
        """
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        self._seed = seed
        self._register_seeds(seed)

    def separate_data_parallel_seeds(self) -> None:
        """Let dropout differ from here on between data-parallel ranks, which upstream gives one mask for all.

        To be called once the model is built: its initial weights come from the common seed.
        """
        self._register_seeds(self._seed + DATA_PARALLEL_SEED_STRIDE * (1 + self.get_local_rank(ParallelMode.DATA)))

    def _register_seeds(self, seed: int) -> None:
        random_state.reset_seeds()
        pipeline_offset = 1024 * self._local_ranks.get(ParallelMode.PIPELINE, 0)
        tensor_rank = self.get_local_rank(ParallelMode.TENSOR)
        random_state.add_seed(ParallelMode.DATA, seed)
        random_state.add_seed(ParallelMode.TENSOR, seed + tensor_rank + pipeline_offset)
        random_state.set_mode(ParallelMode.DATA)

    def destroy(self) -> None:
        """Leave all groups and forget the run, so that the process can launch another.

        Upstream (parallel_context.py:514) keeps seeds, ranks and the layers' settings; the next launch asserts that its
        seeds are new.
        """
        if self.heartbeat is not None:
            self.heartbeat.close()
        super().destroy()
        random_state.reset_seeds()
        tensor_parallel_env.load()
        for table in (self._global_ranks, self._local_ranks, self._world_sizes, self._cpu_groups, self._ranks_in_group):
            table.clear()
        self._config = self.timeout = self.heartbeat = None


class DeviceSeedManager(SeedManager):
    """`SeedManager` of the training device's generator; upstream (random/seed_manager.py:56-84) knows only CUDA's."""

    def set_mode(self, parallel_mode: ParallelMode) -> None:
        if self._current_mode is not None:
            self._seed_states[self._current_mode] = _generator_state()
        self._current_mode = parallel_mode
        _set_generator_state(self._seed_states[parallel_mode])

    def add_seed(self, parallel_mode: ParallelMode, seed: int, overwrite: bool = False) -> None:
        assert overwrite or parallel_mode not in self._seed_states, f"the seed of {parallel_mode} has been added"
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            torch.manual_seed(seed)
            self._seeds[parallel_mode], self._seed_states[parallel_mode] = seed, _generator_state()


def _generator_state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_generator_state(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def launch(
    config: Mapping[str, Any],
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str = "nccl",
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
    timeout: float | None = None,
) -> None:
    """Join the process groups, set the device and the seed, and put ``config`` into ``gpc.config``.

    Colossal-AI's `launch`, and ``timeout``: the seconds after which a rank gives up waiting for the others and names
    those that are lost; by default PyTorch's (30 minutes for gloo), and none is named.
    """
    gpc.timeout = None if timeout is None else timedelta(seconds=patience_of(timeout))
    gpc.heartbeat = None if timeout is None else Heartbeat(rank, world_size, timeout)
    upstream_launch(config, rank, world_size, host, port, backend, local_rank, seed, verbose)


def shutdown() -> None:
    """Leave the process groups of the last launch, if there is one."""
    if gpc.is_initialized(ParallelMode.GLOBAL):
        gpc.destroy()


def repair_context() -> None:
    """Mend the one context and the one seed manager that all of Colossal-AI holds on to."""
    gpc.__class__ = RepairedContext
    random_state._SEED_MANAGER = DeviceSeedManager()
