"""The cache: its bound, its order of eviction, and that a full disk neither stops nor changes what is read."""

import errno
import os
import random
import time
from pathlib import Path

from common.data.object_storage import BlockCache


def is_hit(cache: BlockCache, key: str) -> bool:
    fetched, content = [], random.Random(key).randbytes(1000)
    assert cache.read(key, lambda: fetched.append(key) or content) == content
    return not fetched


def test_the_least_recently_read_is_evicted(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 11_200)
    (tmp_path / "thesis.tex").write_bytes(bytes(100_000))
    (tmp_path / f"{'0' * 64}.block.1.2").write_bytes(bytes(500))  # left by a process that was killed
    for key in "abcdefghij":
        assert not is_hit(cache, key)
        time.sleep(0.002)  # a file's time has the kernel's resolution
    assert is_hit(cache, "a")
    assert not is_hit(cache, "k")
    assert sum(path.stat().st_size for path in tmp_path.glob("*.block*")) <= 11_200
    assert all(is_hit(BlockCache(tmp_path, 11_200), key) for key in "aijk")
    assert not is_hit(cache, "b")
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".block"} == {"thesis.tex"}
    assert not any(is_hit(BlockCache(tmp_path / "small", 500), "a") for _ in range(2))


def test_a_full_disk_costs_the_cache_only(tmp_path: Path, capsys, monkeypatch) -> None:
    def replace(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = BlockCache(tmp_path, 10**6)
    monkeypatch.setattr(Path, "replace", replace)
    assert not any(is_hit(cache, key) for key in "ab")
    assert list(tmp_path.iterdir()) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: DATA.cache={tmp_path}: No space left on device; continuing without it")
