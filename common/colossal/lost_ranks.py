"""Say which rank is gone when the others can no longer reach it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from common.colossal.upstream import gpc
from common.errors import UserError

DEFAULT_TIMEOUT = 60.0  # seconds
GRACE = 2.0  # seconds between the first and the last rank to notice a rank that hangs


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Turn a failed collective inside the context into a `UserError` that names the ranks that do not answer.

    A collective fails at once on the neighbours of a rank that has died, and after the launch's ``timeout`` on the
    others, and on all where a rank hangs: so those that notice wait for each other for that long.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        timeout = gpc.timeout.total_seconds() if gpc.timeout else DEFAULT_TIMEOUT
        lost = _absent_ranks(timeout + GRACE)
        if not lost:
            raise
        names = f"rank {lost[0]} is" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} are"
        raise UserError(
            f"{names} gone or hanging, of {dist.get_world_size()} processes: its own message says why; then start again"
        ) from error


def _is_lost_connection(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)


def _absent_ranks(seconds: float) -> list[int]:
    """Return the ranks that do not call this function within ``seconds``, by way of the launch's key-value store."""
    store = dist.PrefixStore("roll call", dist.distributed_c10d._get_default_store())
    ranks, absent = range(dist.get_world_size()), [0]  # rank 0 keeps the store
    deadline = time.monotonic() + seconds
    try:
        store.set(str(dist.get_rank()), "")
        while absent and time.monotonic() < deadline:
            absent = [rank for rank in ranks if not store.check([str(rank)])]
            time.sleep(0.02)
    except RuntimeError:
        pass  # the store cannot be reached, or no longer: rank 0 has ended its own roll call
    return absent
