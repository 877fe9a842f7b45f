import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from common import huge_pages
from common.huge_pages import MADV_COLLAPSE, MADV_HUGEPAGE, SETTINGS, HugePagesHook, use_huge_pages

# Whether a heap that is in use stays as it is, and how much of it is in huge pages then, in MiB.
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
PAGE = 2 << 20


def can_collapse() -> bool:
    """Return whether the system gives programs huge pages at once."""
    version = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    enabled = SETTINGS / "enabled"
    return version >= (6, 1) and enabled.exists() and "[never]" not in enabled.read_text()


def test_the_heap_is_in_huge_pages_and_unchanged() -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environ.pop("GLIBC_TUNABLES", None)
    program = [sys.executable, "-c", PROGRAM]
    answer = subprocess.run(program, env=environ, capture_output=True, text=True, check=True).stdout
    assert int(answer) >= (56 if can_collapse() else 0)  # where it cannot, the tests below say what is asked for


@pytest.fixture
def advice(monkeypatch, tmp_path) -> list[tuple[int, int, int]]:
    """What the kernel is asked for, of a system that lets programs ask for pages of 2 MiB."""
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "hpage_pmd_size").write_text(f"{PAGE}\n")
    monkeypatch.setattr(huge_pages, "SETTINGS", tmp_path)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    asked: list[tuple[int, int, int]] = []

    def madvise(*arguments: int) -> None:
        asked.append(arguments)

    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda _: SimpleNamespace(madvise=madvise))
    return asked


def test_whole_pages_of_the_heap_are_asked_for(advice) -> None:
    use_huge_pages()
    maps = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]")]
    heaps = [tuple(int(address, 16) for address in line.split("-")) for line in maps]
    wholes = [(start, length) for start, length, what in advice if what == MADV_HUGEPAGE]
    assert wholes
    for start, length in wholes:
        assert start % PAGE == length % PAGE == 0
        assert any(low <= start and start + length <= high for low, high in heaps)
    pages = [page for start, length in wholes for page in range(start, start + length, PAGE)]
    assert [call for call in advice if call[2] == MADV_COLLAPSE] == [(page, PAGE, MADV_COLLAPSE) for page in pages]


def test_the_users_choice_stays(advice, monkeypatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0:glibc.malloc.hugetlb=0")
    use_huge_pages()
    assert not advice


@pytest.mark.parametrize("setting", ["always madvise [never]", None])
def test_nothing_is_done_where_the_system_has_none(advice, setting: str | None) -> None:
    enabled = huge_pages.SETTINGS / "enabled"
    enabled.write_text(setting) if setting else enabled.unlink()
    use_huge_pages()
    assert not advice


def test_asked_for_once_after_the_second_step(monkeypatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(huge_pages, "use_huge_pages", lambda: calls.append(threading.current_thread().name))
    hook, counts = HugePagesHook(), []
    for update_done in (False, True, False, True, False, True, False, True):
        hook.after_train_iter(SimpleNamespace(update_done=update_done))
        for thread in threading.enumerate():
            if thread.name == "huge-pages":
                thread.join()
        counts.append(len(calls))
    assert counts == [0, 0, 0, 1, 1, 1, 1, 1]
    assert calls == ["huge-pages"]
