"""Checkpoints saved in one parallel mode and loaded in another; interrupted, damaged and foreign ones."""

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import common.checkpoint.save
from common.checkpoint.content import FILES, MARKER, find_fault
from common.checkpoint.save import (
    checkpoint_path,
    clear_old,
    list_checkpoints,
    mark_best,
    put_back_old,
    write_checkpoint,
)
from common.checkpoint.state import full_state_dict, load_full_state_dict
from common.colossal import canonical_state, named_shards
from common.errors import UserError
from common.optim.build import build_optimizer
from common.testing.checkpoints import build_content
from common.testing.parity_cases import (
    ACCUMULATION,
    CASES,
    MAX_NORM,
    OPTIMIZERS,
    build_engine,
    build_tiny_model,
    fit,
    micro_batches,
)
from common.testing.ranks import launched, run_ranks

aten = torch.ops.aten
MODES = ["none", "1d-2", "2d-4", "2.5d-8", "3d-8", "zero 3", "zero 1 x 1d-2"]
BEFORE, AFTER = 2, 1  # optimizer steps
BATCHES = list(micro_batches(BEFORE + AFTER))
CUT = BEFORE * ACCUMULATION


def config(case: str) -> dict:
    return CASES[case][1] | {"clip_grad_norm": MAX_NORM, "gradient_accumulation": ACCUMULATION}


def train_and_save(case: str, folder: Path) -> dict[str, list[float]]:
    """Save after `BEFORE` steps with each optimizer; return the losses of further steps without tensor parallelism."""
    losses = {}
    with launched(**config(case)):
        for name in OPTIMIZERS:
            model, optimizer, engine = build_engine(name)
            fit(engine, BATCHES[:CUT])
            state = full_state_dict(model, optimizer)
            if torch.distributed.get_rank() == 0:
                write_checkpoint(checkpoint_path(folder / case / name, BEFORE), state)
            if case == "none":
                losses[name] = fit(engine, BATCHES[CUT:])
    return losses


class CopyCount(TorchDispatchMode):
    copies = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.copies += function.overloadpacket in (aten.copy_, aten._to_copy, aten.clone)
        return function(*args, **kwargs or {})


def save_twice(case: str) -> tuple[int, int, bool]:
    """Return how many tensors this rank copies in the second save, how many it has, and whether they are up to date."""
    with launched(**config(case)):
        model, optimizer, engine = build_engine("lamb")
        fit(engine, BATCHES[:CUT])
        buffers: dict = {}
        first = full_state_dict(model, optimizer, buffers=buffers)
        fit(engine, BATCHES[CUT:])
        with CopyCount() as count:
            second = full_state_dict(model, optimizer, buffers=buffers)
        pairs = [(t, first[file][name]) for file in second for name, t in second[file].items()]
        whole = dict(canonical_state(model))
        is_new = all(torch.equal(whole[name], tensor) for name, tensor in second["model.safetensors"].items())
        return count.copies, len(pairs), is_new and all(new is old for new, old in pairs)


def test_rank_0_alone_copies_into_the_same_memory_each_time() -> None:
    (copies, tensors, right), *others = run_ranks(2, save_twice, "none")
    assert copies == tensors == 4 * len(list(build_tiny_model().parameters()))  # weight, two moments, step
    assert right
    assert others == [(0, 0, True)]


def load_and_train(case: str, folder: Path) -> dict[tuple[str, str], list[float]]:
    """Return the losses after a checkpoint of every mode, by mode and optimizer, the latter alternating."""
    losses = {}
    with launched(**config(case)):
        for number, saved_in in enumerate(MODES):
            name = list(OPTIMIZERS)[(MODES.index(case) + number) % len(OPTIMIZERS)]
            model, optimizer, engine = build_engine(name)
            with torch.no_grad():
                for parameter in named_shards(model).values():
                    parameter.zero_()
            load_full_state_dict(checkpoint_path(folder / saved_in / name, BEFORE), model, optimizer)
            losses[saved_in, name] = fit(engine, BATCHES[CUT:])
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Checkpoints of every mode and optimizer, and the losses of the uninterrupted runs without tensor parallelism."""
    folder = tmp_path_factory.mktemp("checkpoints")
    uninterrupted = {case: run_ranks(CASES[case][0], train_and_save, case, folder)[0] for case in MODES}
    return folder, uninterrupted["none"]


@pytest.mark.parametrize("case", MODES)
@pytest.mark.slow
def test_any_mode_resumes_from_any_other(case: str, saved: tuple[Path, dict[str, list[float]]]) -> None:
    folder, uninterrupted = saved
    for losses in run_ranks(CASES[case][0], load_and_train, case, folder):
        assert len(losses) == len(MODES)
        for (saved_in, name), values in losses.items():
            assert values == pytest.approx(uninterrupted[name], rel=1e-5), (saved_in, name)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path, small, wide = tmp_path / "step-00000007", build_tiny_model(), build_tiny_model(width=16)
    write_checkpoint(path, dict(full_state_dict(small, build_optimizer(small))))
    with pytest.raises(UserError, match=f"^{path} is of another architecture: .*pos_embed .* more; keep the MODEL it"):
        load_full_state_dict(path, wide, build_optimizer(wide))


def write_small(path: Path, value: float = 0.0, **other: object) -> Path:
    write_checkpoint(path, build_content(value=value) | other)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path / "step-00000001", 1.0)


def value_of(path: Path) -> float:
    assert find_fault(path) is None
    return load_file(path / "model.safetensors")["head.bias"][0].item()


def test_checksums_and_modes_are_those_of_the_shell(small: Path, tmp_path: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "COMPLETE"], cwd=small, check=True, capture_output=True)
    (tmp_path / "new").touch()
    assert {file.stat().st_mode for file in small.iterdir()} == {(tmp_path / "new").stat().st_mode}


@pytest.mark.parametrize("name", [*FILES, MARKER])
def test_damage_is_found(small: Path, name: str) -> None:
    file = small / name
    content = file.read_bytes()
    for damaged in (content[:-2], bytes([content[0] ^ 1]) + content[1:], b""):
        file.write_bytes(damaged)
        assert find_fault(small)
    file.unlink()
    assert find_fault(small) == f"{name}: No such file or directory"


def write_and_die(path: Path, value: float, calls: int) -> bool:
    """Write in a process that ends at its ``calls``-th call that changes the disk; return whether it did."""

    def counted(function: Callable) -> Callable:
        def count(*args: object, **options: object) -> object:
            nonlocal calls
            calls -= 1
            return function(*args, **options) if calls else os._exit(9)

        return count

    def write() -> None:
        for owner, name in [(Path, "mkdir"), (Path, "rename"), (Path, "write_bytes")]:
            setattr(owner, name, counted(getattr(owner, name)))
        common.checkpoint.save.sync = counted(common.checkpoint.save.sync)
        common.checkpoint.save.save_file = counted(common.checkpoint.save.save_file)
        write_small(path, value)

    process = multiprocessing.get_context("fork").Process(target=write)
    process.start()
    process.join()
    assert process.exitcode in (0, 9)
    return process.exitcode == 9


def test_after_a_kill_at_any_point_the_old_or_the_new_checkpoint_is_whole(small: Path) -> None:
    seen = []
    while write_and_die(small, 2.0, calls=len(seen) + 1):
        put_back_old(small.parent)
        seen.append(value_of(small))
        write_small(small, 1.0)
    assert value_of(small) == 2.0
    assert seen == [1.0] * (len(seen) - 1) + [2.0]  # the last call comes after the new one is in its place
    assert len(seen) > 10


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        path = write_small(checkpoint_path(tmp_path, step))
        if step == 2:
            mark_best(path)
        (tmp_path / ".step-00000099.partial").mkdir()
        (tmp_path / ".best.partial").symlink_to(path.name)  # as where `mark_best` is killed
        clear_old(tmp_path, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"step-0000000{step}" for step in (6, 5, 2)]
    assert (tmp_path / "best").resolve() == checkpoint_path(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"best", "step-00000002", "step-00000005", "step-00000006"}
    (tmp_path / "best").unlink()
    (tmp_path / "best").mkdir()  # as copied by a tool that follows links
    (tmp_path / "best" / "model.safetensors").write_bytes(b"")
    mark_best(path)
    clear_old(tmp_path, keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {"best", "step-00000006"}
    assert (tmp_path / "best").resolve() == path


def test_a_failed_write_leaves_the_old_checkpoint(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected torch.Tensor"):
        write_checkpoint(small, {"model.safetensors": {"weight": "no tensor"}})
    assert value_of(small) == 1.0
    assert list(tmp_path.iterdir()) == [small]
