"""Launch a script of a user's own, as upstream's functions of the same names do."""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from common.config.load import load_own_config
from common.engine import upstream
from common.engine.groups import join_groups


def get_default_parser() -> argparse.ArgumentParser:
    """Return upstream's parser without its default ``--backend nccl``, which needs GPUs.

    legacy/initialize.py:54 has it.
    """
    parser = upstream.get_default_parser()
    parser.set_defaults(backend=None)
    parser.add_argument("--local-rank", type=int)  # torch.distributed.launch writes it so
    return parser


def launch(
    config: Any,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    *more: Any,
    **named: Any,
) -> None:
    """Join the process groups as rank ``rank``; see `_launch`."""
    _launch(join_groups, config, (rank, world_size, host, port), backend, *more, **named)


def launch_from_slurm(
    config: Any,
    host: str | None,
    port: int | None,
    backend: str | None = None,
    *more: Any,
    **named: Any,
) -> None:
    """Join the process groups as a task of srun; see `_launch`."""
    # The srun commands of Colossal-AI's examples set one of these.
    host = host or os.environ.get("HOST") or os.environ.get("MASTER_ADDR")
    _launch(upstream.launch_from_slurm, config, (host, port), backend, *more, **named)


def launch_from_openmpi(
    config: Any, host: str, port: int, backend: str | None = None, *more: Any, **named: Any
) -> None:
    """Join the process groups as a task of mpirun; see `_launch`."""
    _launch(upstream.launch_from_openmpi, config, (host, port), backend, *more, **named)


def launch_from_torch(config: Any, backend: str | None = None, *more: Any, **named: Any) -> None:
    """Join the process groups as a process of torchrun; see `_launch`."""
    _launch(upstream.launch_from_torch, config, (), backend, *more, **named)


def _launch(
    start: Callable[..., None],
    config: Any,
    address: Sequence[Any],
    backend: str | None,
    *more: Any,
    **named: Any,
) -> None:
    """Launch a script of a user's own, with a dict, a file or a recipe, resolved as for a train.py.

    ``backend`` defaults to nccl on GPUs and gloo on CPUs. The rest are upstream's: ``seed``,
    ``verbose``, and in `launch` before them ``local_rank``.
    """
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    # after this gpc.config holds the resolved config, as in a train.py
    start(load_own_config(config), *address, backend, *more, **named)
