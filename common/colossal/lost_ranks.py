"""Say which rank is gone when the others can no longer reach it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from common.colossal.heartbeat import describe
from common.colossal.upstream import gpc
from common.errors import UserError


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Turn a failed collective inside the context into a `UserError` that names the ranks that are lost.

    A collective fails at once on the neighbours of a rank that has died, and where a rank hangs, after the launch's
    ``timeout``, less what it takes to find out. Any other failure is this rank's own: the others are told its message.
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
        raise UserError(describe(verdict, dist.get_world_size())) from error


def _is_lost_connection(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)
