"""Report the lost ranks when a collective fails."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from common.colossal.heartbeat import describe
from common.colossal.upstream import gpc
from common.errors import UserError


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Turn a failed collective into a `UserError` with the lost ranks; send any other exception to the other ranks.

    A collective fails at once if a rank has died, and within the launch's ``timeout`` if one hangs.
    """
    try:
        yield
    except Exception as error:
        if gpc.heartbeat is None:
            raise
        if not isinstance(error, RuntimeError) or not _is_lost_connection(error):
            gpc.heartbeat.fail(f"{type(error).__name__}: {error}".partition("\n")[0])
            raise
        verdict = gpc.heartbeat.await_verdict()
        if not verdict:
            raise
        if dist.get_backend() == "nccl":  # its clean-up would wait for kernels that never end
            atexit.register(os._exit, 2)  # runs after all threads, such as the checkpoint writer, have ended
        raise UserError(describe(verdict, dist.get_world_size())) from error


def _is_lost_connection(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)
