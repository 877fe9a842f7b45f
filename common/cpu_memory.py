"""Keep the memory that a training step frees on a CPU for the next step."""

import ctypes
import os

# glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Have glibc's malloc neither give freed memory back to the system nor map large blocks one by one.

    By default it does both (mallopt(3)), so that activations are faulted in anew in every step. Environment variables
    MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_MAX_, or another allocator, keep what the user chose. Other C libraries
    are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or os.environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_"}:
        return
    mallopt(M_TRIM_THRESHOLD, -1)
    mallopt(M_MMAP_MAX, 0)
