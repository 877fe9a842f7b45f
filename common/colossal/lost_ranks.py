"""Report the lost ranks when a collective fails."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from common.colossal.heartbeat import Heartbeat, describe
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
        explained = _explain(error, gpc.heartbeat)
        if dist.get_backend() == "nccl":  # its clean-up would wait for kernels that never end
            # runs after all threads, such as the checkpoint writer, have ended, and after the error was printed
            atexit.register(os._exit, 2 if isinstance(explained, UserError) else 1)
        if explained is error:
            raise
        raise explained from error


def _explain(error: Exception, heartbeat: Heartbeat) -> Exception:
    """Return a `UserError` with the lost ranks instead of the error of their lost connections."""
    is_lost_connection = isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)
    if not isinstance(error, RuntimeError) or not is_lost_connection:
        heartbeat.fail(f"{type(error).__name__}: {error}".partition("\n")[0])
        return error
    verdict = heartbeat.await_verdict()
    return UserError(describe(verdict, dist.get_world_size())) if verdict else error
