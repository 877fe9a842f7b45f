"""Colossal-AI's launchers and default parser, for users' own scripts."""

import argparse
import os
import runpy
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from common.colossal import upstream
from common.errors import UserError


def get_default_parser() -> argparse.ArgumentParser:
    """Return upstream's parser without its default ``--backend nccl`` (legacy/initialize.py:54), which needs GPUs."""
    parser = upstream.get_default_parser()
    parser.set_defaults(backend=None)
    return parser


def launch_from_slurm(config: Any, host: str | None, port: int | None, backend: str | None = None, **more: Any) -> None:
    """Join the process groups as a task of srun; see `_launch`."""
    host = host or os.environ.get("HOST") or os.environ.get("MASTER_ADDR")
    if not host or not port:
        raise UserError("--host and --port are required: the first node, and a free port on it")
    _launch(upstream.launch_from_slurm, config, backend, host=host, port=port, **more)


def launch_from_openmpi(config: Any, host: str, port: int, backend: str | None = None, **more: Any) -> None:
    """Join the process groups as a task of mpirun; see `_launch`."""
    _launch(upstream.launch_from_openmpi, config, backend, host=host, port=port, **more)


def launch_from_torch(config: Any, backend: str | None = None, **more: Any) -> None:
    """Join the process groups as a process of torchrun; see `_launch`."""
    _launch(upstream.launch_from_torch, config, backend, **more)


def _launch(launch: Callable[..., None], config: Any, backend: str | None, **more: Any) -> None:
    """Launch with ``config``, a dict or a file; ``backend`` defaults to nccl on GPUs and gloo on CPUs.

    Upstream copies the file elsewhere before importing it, so that the file's own imports fail.
    """
    if not isinstance(config, Mapping):
        values = runpy.run_path(str(config))
        config = {
            k: v for k, v in values.items() if not k.startswith("_") and not isinstance(v, types.ModuleType | type)
        }
    launch(config=dict(config), backend=backend or ("nccl" if torch.cuda.is_available() else "gloo"), **more)
