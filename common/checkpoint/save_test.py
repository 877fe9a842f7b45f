"""Checkpoints are written whole or not at all; which of them are kept."""

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file

import common.checkpoint.save
from common.checkpoint.resume import choose_checkpoint
from common.checkpoint.save import (
    best_checkpoint,
    checkpoint_path,
    clear_old,
    list_checkpoints,
    mark_best,
    write_checkpoint,
)
from common.testing.checkpoints import build_content


def write_small(path: Path, value: float = 0.0) -> Path:
    write_checkpoint(path, build_content(value=value))
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path / "checkpoints" / "step-00000001", 1.0)


def value_of(path: Path) -> float:
    return load_file(path / "model.safetensors")["head.bias"][0].item()


def test_checksums_and_modes_are_those_of_the_shell(small, tmp_path):
    subprocess.run(
        ["sha256sum", "--check", "--strict", "COMPLETE"], cwd=small, check=True, capture_output=True
    )
    (tmp_path / "new").touch()
    mode = (tmp_path / "new").stat().st_mode
    assert {file.stat().st_mode for file in small.iterdir()} == {mode}


def write_and_die(path: Path, calls: int) -> bool:
    """Write 2.0 in a process that ends at its ``calls``-th call that changes the disk; return
    whether it did.
    """

    def counted(function: Callable) -> Callable:
        def count(*args: object, **options: object) -> object:
            nonlocal calls
            calls -= 1
            return function(*args, **options) if calls else os._exit(9)

        return count

    def write() -> None:
        for owner, name in [(Path, "mkdir"), (Path, "rename"), (Path, "write_bytes")]:
            setattr(owner, name, counted(getattr(owner, name)))
        os.fsync = counted(os.fsync)
        common.checkpoint.save.save_file = counted(common.checkpoint.save.save_file)
        write_small(path, 2.0)

    process = multiprocessing.get_context("fork").Process(target=write)
    process.start()
    process.join()
    assert process.exitcode in (0, 9)
    return process.exitcode == 9


def test_after_a_kill_at_any_point_the_old_or_the_new_checkpoint_is_whole(small):
    seen = []
    while write_and_die(small, calls=len(seen) + 1):
        assert choose_checkpoint("auto", small.parent.parent) == small
        seen.append(value_of(small))
        write_small(small, 1.0)
    assert value_of(small) == 2.0
    *earlier, last = seen
    assert set(earlier) == {1.0}
    assert last == 2.0  # this call comes after the new one is in its place
    assert len(seen) == 19  # make the folder, write and sync 7 files, sync, rename twice, sync


def test_the_newest_and_the_best_are_kept(tmp_path):
    later = write_small(checkpoint_path(tmp_path, 99))
    (later / "model.safetensors").write_bytes(b"damaged")
    for step in range(1, 7):
        path = write_small(checkpoint_path(tmp_path, step))
        if step == 2:
            mark_best(path)
        (tmp_path / ".step-00000099.partial").mkdir()
        (tmp_path / f".{path.name}.old").mkdir()
        (tmp_path / ".best.txt.partial").touch()  # a killed `mark_best` leaves it
        clear_old(path, keep=2)
    assert list_checkpoints(tmp_path) == [
        later,
        *(checkpoint_path(tmp_path, step) for step in (6, 5, 2)),
    ]
    assert (tmp_path / "best").resolve() == checkpoint_path(tmp_path, 2)
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize("has_links", [True, False])
def test_the_best_is_marked_with_and_without_links(has_links, tmp_path, monkeypatch):
    first, second = (write_small(checkpoint_path(tmp_path, step), step) for step in (1, 2))
    link = tmp_path / "best"
    link.symlink_to(first.name)
    assert best_checkpoint(tmp_path) == first  # as earlier versions mark it
    if not has_links:
        monkeypatch.setattr(Path, "symlink_to", mock.Mock(side_effect=PermissionError))
    mark_best(second)
    assert best_checkpoint(tmp_path) == second
    assert link.exists() == has_links


def test_a_copy_of_the_best_is_kept_where_the_link_belongs(tmp_path, capfd):
    """As `cp -rL` leaves it."""
    link = write_small(tmp_path / "best", 1.0)
    assert best_checkpoint(tmp_path) == link
    mark_best(write_small(checkpoint_path(tmp_path, 2)))
    assert link.is_symlink()
    (kept,) = tmp_path.glob("best-*")
    assert value_of(kept) == 1.0
    assert f"it is now {kept}" in capfd.readouterr().err
