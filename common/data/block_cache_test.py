"""The cache: its bound, its order of eviction, and that neither kills nor disks lose or change what is read."""

import errno
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from common.data.block_cache import SUM, BlockCache
from common.errors import UserError
from common.testing.commands import forked


def fetch(key: str) -> bytes:
    return random.Random(key).randbytes(1000)


def disk_usage(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if len(path.name) >= 64)


def is_hit(cache: BlockCache, key: str) -> bool:
    fetched = []
    assert cache.read(key, lambda: fetched.append(key) or fetch(key)) == fetch(key)
    return not fetched


def test_the_least_recently_read_is_evicted(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "cache", 10 * (1000 + SUM))
    thesis = tmp_path / "cache" / "thesis.tex"
    thesis.write_bytes(bytes(100_000))
    for key in "abcdefghij":
        assert not is_hit(cache, key)
        time.sleep(0.002)  # a file's time has the kernel's resolution
    assert is_hit(cache, "a")
    assert not is_hit(cache, "k")
    assert disk_usage(cache.folder) <= cache.most
    assert all(is_hit(BlockCache(cache.folder, cache.most), key) for key in "ahijk")
    assert not is_hit(cache, "b")
    assert thesis.exists()
    small = BlockCache(tmp_path / "small", 500)
    assert not is_hit(small, "a")
    assert not is_hit(small, "a")
    assert disk_usage(small.folder) == 0


def test_files_that_were_damaged_or_wiped_are_fetched_again(tmp_path: Path, capsys) -> None:
    cache = BlockCache(tmp_path / "cache", 10**6)
    assert not is_hit(cache, "a")
    (file,) = cache.folder.glob("[0-9a-f]*")
    content = file.read_bytes()
    for damaged in (b"", content[:500], bytes([content[0] ^ 1]) + content[1:]):
        file.write_bytes(damaged)
        assert not is_hit(cache, "a")
        assert is_hit(cache, "a")
    shutil.rmtree(cache.folder)
    assert not is_hit(cache, "a")
    assert is_hit(cache, "a")
    assert capsys.readouterr().err == ""


def test_a_full_disk_costs_the_cache_only(tmp_path: Path, capsys, monkeypatch) -> None:
    def replace(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = BlockCache(tmp_path, 10**6)
    monkeypatch.setattr(Path, "replace", replace)
    assert not is_hit(cache, "a")
    assert not is_hit(cache, "b")
    assert disk_usage(tmp_path) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: DATA.cache={tmp_path}: No space left on device; continuing without it")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="DATA.cache=.*/file: cannot be written .*; choose another"):
        BlockCache(tmp_path / "file", 1)


def test_processes_share_it_and_some_are_killed(tmp_path: Path) -> None:
    most, keys = 20_000, [str(number) for number in range(60)]

    def work(argv: list[str]) -> None:
        cache, choice = BlockCache(tmp_path, most), random.Random(argv[0])
        for _ in range(int(argv[1])):
            key = choice.choice(keys)
            assert cache.read(key, lambda key=key: fetch(key)) == fetch(key)

    for number in range(2):
        with forked(work, [number, 10**9]) as (killed, *_), forked(work, [number + 100, 300]) as (process, *_):
            time.sleep(0.05)
            killed.kill()
            process.join(60)
            assert process.exitcode == 0
        assert disk_usage(tmp_path) <= most
    assert disk_usage(tmp_path) > most / 2
