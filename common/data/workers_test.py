"""A pool of processes that decode."""

from common.testing.commands import run_python

HALF_WRITTEN = """
import torch  # once, not in each worker
from common.data.workers import WorkerPool

for _ in range(8):
    pool = WorkerPool(bytes, 2)
    pool.start()
    results = pool.map(iter([30_000_000] * 100))
    next(results)
    pool.close()
"""


def test_a_pool_ends_while_results_are_written():
    """They exceed what a pipe holds, as those of a training that is stopped in an epoch do."""
    ended = run_python(HALF_WRITTEN, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
