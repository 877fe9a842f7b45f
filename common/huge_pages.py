"""Have the memory that training on a CPU keeps lie in huge pages, which takes the processor fewer table walks."""

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

from common.colossal import BaseHook, Trainer

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
SETTLED = 2  # optimiser steps after which the heap is about as large as it becomes
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # linux/mman.h


class HugePagesHook(BaseHook):
    """Call `use_huge_pages` in a thread once the first steps have made the heap as large as it becomes."""

    def __init__(self) -> None:
        super().__init__(priority=10)
        self.steps = 0

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        self.steps += trainer.update_done
        if trainer.update_done and self.steps == SETTLED:
            threading.Thread(target=use_huge_pages, daemon=True, name="huge-pages").start()


def use_huge_pages() -> None:
    """Move the heap into huge pages, where the system allows programs to ask for them (Linux; at once from 6.1 on).

    Nothing is done where the environment variable GLIBC_TUNABLES has ``glibc.malloc.hugetlb``.
    """
    try:
        allowed = "[never]" not in (SETTINGS / "enabled").read_text()
        size = int((SETTINGS / "hpage_pmd_size").read_text())
        mappings = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    if not allowed or "glibc.malloc.hugetlb" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for mapping in mappings:
        if not mapping.endswith("[heap]"):
            continue
        start, end = (int(address, 16) for address in mapping.split()[0].split("-"))
        start, end = -(-start // size) * size, end // size * size
        if start < end:
            madvise(start, end - start, MADV_HUGEPAGE)
        for page in range(start, end, size):
            madvise(page, size, MADV_COLLAPSE)
