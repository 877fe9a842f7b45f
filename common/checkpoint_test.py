"""Checkpoints: saved in any parallel mode, continued in any other; and what is refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from common.checkpoint import load_checkpoint, load_model_state, newest_checkpoint, save_checkpoint
from common.colossal.tensor_parallel.cases import (
    ACCUMULATION,
    CASES,
    MAX_NORM,
    OPTIMIZERS,
    build_engine,
    build_tiny_model,
    fit,
    micro_batches,
)
from common.errors import UserError
from common.optimizer import build_optimizer
from common.testing import launched, run_ranks

MODES = ["none", "1d-2", "2d-4", "2.5d-8", "3d-8"]
BEFORE, AFTER = 2, 2  # optimiser steps
BATCHES = list(micro_batches(BEFORE + AFTER))
CUT = BEFORE * ACCUMULATION


def config(case: str) -> dict:
    return {"parallel": CASES[case][1], "clip_grad_norm": MAX_NORM, "gradient_accumulation": ACCUMULATION}


def train_and_save(case: str, folder: Path) -> dict[str, list[float]]:
    """Save after `BEFORE` steps with each optimiser; return the losses from there on."""
    losses = {}
    with launched(**config(case)):
        for name in OPTIMIZERS:
            model, optimizer, engine = build_engine(name)
            fit(engine, BATCHES[:CUT])
            save_checkpoint(folder / case / name, model, optimizer, {"step": BEFORE, "epoch": 0})
            losses[name] = fit(engine, BATCHES[CUT:])
    return losses


def load_and_train(case: str, folder: Path) -> dict[tuple[str, str], list[float]]:
    """Return the losses after a checkpoint of every mode, by mode and optimiser; the optimisers take turns."""
    losses = {}
    with launched(**config(case)):
        for number, saved_in in enumerate(MODES):
            name = list(OPTIMIZERS)[(MODES.index(case) + number) % len(OPTIMIZERS)]
            model, optimizer, engine = build_engine(name)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            state = load_checkpoint(folder / saved_in / name / f"step-{BEFORE:08d}", model, optimizer)
            assert (state["step"], state["epoch"]) == (BEFORE, 0)
            losses[saved_in, name] = fit(engine, BATCHES[CUT:])
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Checkpoints of every mode and optimiser, and the losses of the runs without tensor parallelism that went on."""
    folder = tmp_path_factory.mktemp("checkpoints")
    uninterrupted = {case: run_ranks(CASES[case][0], train_and_save, case, folder)[0] for case in MODES}
    return folder, uninterrupted["none"]


@pytest.mark.parametrize("case", MODES)
def test_any_mode_goes_on_from_any_other(case: str, saved: tuple[Path, dict[str, list[float]]]) -> None:
    folder, uninterrupted = saved
    for losses in run_ranks(CASES[case][0], load_and_train, case, folder):
        assert len(losses) == len(MODES)
        for (saved_in, name), values in losses.items():
            assert values == pytest.approx(uninterrupted[name], rel=1e-5), (saved_in, name)


@pytest.mark.parametrize("case", MODES[1:])
def test_files_are_the_same_in_every_mode(case: str, saved: tuple[Path, dict[str, list[float]]]) -> None:
    folder, _ = saved
    for name in OPTIMIZERS:
        ours, plain = (load_model_state(folder / mode / name / f"step-{BEFORE:08d}") for mode in (case, "none"))
        assert {key: tensor.shape for key, tensor in ours.items()} == {key: t.shape for key, t in plain.items()}
        for key, tensor in plain.items():
            if not key.endswith("qkv.bias"):  # whose keys' part follows from rounding alone
                torch.testing.assert_close(ours[key], tensor, rtol=1e-4, atol=1e-5)


def small_checkpoint(folder: Path, model: nn.Module) -> Path:
    return save_checkpoint(folder, model, build_optimizer(model), {"step": 7})


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, build_tiny_model())
    model = build_tiny_model(num_classes=9, pool="avg")
    with pytest.raises(UserError) as caught:
        load_checkpoint(path, model, build_optimizer(model))
    message = str(caught.value)
    assert message.startswith(f"{path} is of another architecture: ")
    assert "cls_token [1, 1, 32] (model: none)" in message
    assert "head.weight [8, 32] (model: [9, 32])" in message
    assert "\n" not in message


def test_a_long_list_of_differences_is_cut_short(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, build_tiny_model())
    model = build_tiny_model(width=16)
    with pytest.raises(UserError, match=r"pos_embed .*, and \d+ more; load it with the MODEL it was trained with"):
        load_checkpoint(path, model, build_optimizer(model))


def test_an_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, build_tiny_model())
    assert newest_checkpoint(tmp_path) == path
    (path / "COMPLETE").unlink()
    assert newest_checkpoint(tmp_path) is None
    with pytest.raises(UserError, match="is not a complete checkpoint: it has no COMPLETE"):
        load_model_state(path)
