import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from common import huge_pages
from common.huge_pages import SETTINGS, HugePagesHook

# What part of a heap that is in use is in huge pages, in MiB.
PROGRAM = r"""
import re
from pathlib import Path
from common.cpu_memory import keep_freed_memory
from common.huge_pages import use_huge_pages
keep_freed_memory()
block = bytearray(b"x") * (64 << 20)
use_huge_pages()
assert block.count(b"x") == len(block)
print(sum(map(int, re.findall(r"AnonHugePages: *(\d+)", Path("/proc/self/smaps").read_text()))) >> 10)
"""


def huge_mebibytes(**environ: str) -> int:
    path = os.pathsep.join(filter(None, sys.path))
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": path} | environ
    program = [sys.executable, "-c", PROGRAM]
    return int(subprocess.run(program, env=environ, capture_output=True, text=True, check=True).stdout)


def can_collapse() -> bool:
    """Return whether the system lets programs have huge pages at once."""
    version = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    enabled = SETTINGS / "enabled"
    return version >= (6, 1) and enabled.exists() and "[never]" not in enabled.read_text()


def test_the_heap_is_in_huge_pages() -> None:
    assert (huge_mebibytes() >= 56) == can_collapse()


@pytest.mark.skipif(not can_collapse(), reason="the system has no huge pages for programs that ask")
def test_the_users_choice_stays() -> None:
    assert huge_mebibytes(GLIBC_TUNABLES="glibc.malloc.hugetlb=0") == 0


@pytest.mark.parametrize("settings", ["always madvise [never]", None])
def test_nothing_is_done_where_the_system_has_none(monkeypatch, tmp_path, settings: str | None) -> None:
    if settings:
        (tmp_path / "enabled").write_text(settings)
        (tmp_path / "hpage_pmd_size").write_text("2097152")
    monkeypatch.setattr(huge_pages, "SETTINGS", tmp_path)
    monkeypatch.setattr(huge_pages.ctypes, "CDLL", None)
    huge_pages.use_huge_pages()


def test_asked_for_once_after_the_second_step(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(huge_pages.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: calls.append(1)))
    hook, counts = HugePagesHook(), []
    for update_done in (False, True, False, True, False, True, False, True):
        hook.after_train_iter(SimpleNamespace(update_done=update_done))
        counts.append(len(calls))
    assert counts == [0, 0, 0, 1, 1, 1, 1, 1]
