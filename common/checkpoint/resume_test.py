"""Which checkpoint is gone on with, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from common.checkpoint.resume import ask_first_rank, check_data, choose_checkpoint, compare_configs
from common.checkpoint.save import checkpoint_path, write_checkpoint
from common.config.batch_plan import DataSummary
from common.errors import AgreedError, UserError
from common.testing.ranks import launched, run_ranks

CONFIG = {"TOTAL_BATCH_SIZE": 16, "SEED": 1, "OPTIMIZER": {"name": "lamb"}, "LEARNING_RATE": 0.1, "DATA": {"root": "a"}}
DATA = DataSummary(60, 10, 3, fingerprint="same", earlier=("before a repair",))


def write(output: Path, *steps: int) -> list[Path]:
    paths = [checkpoint_path(output / "checkpoints", step) for step in steps]
    about = {"config": CONFIG, "data": {"fingerprint": "same", "train_samples": 61}}
    for path in paths:
        tensors = {"weight": torch.ones(3)}
        files = {"model.safetensors": tensors, "optimizer.safetensors": tensors, "trainer.json": b"{}"}
        write_checkpoint(path, files | {"config.json": json.dumps(about).encode()})
    (output / "config.json").write_text("{}")
    return paths


def test_the_newest_is_chosen(tmp_path: Path) -> None:
    first, second = write(tmp_path, 9, 12)
    assert choose_checkpoint("auto", tmp_path) == second
    assert choose_checkpoint(str(first), tmp_path) == first
    assert choose_checkpoint(str(tmp_path), tmp_path / "other") == second
    assert choose_checkpoint("auto", tmp_path / "other") is None
    assert choose_checkpoint("never", tmp_path / "other") is None


@pytest.mark.parametrize("damage", ["truncated", "flipped", "not complete"])
def test_a_damaged_one_is_left_out_with_a_warning(tmp_path: Path, damage: str, capsys) -> None:
    first, second = write(tmp_path, 9, 12)
    file = second / "model.safetensors"
    content = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(content[:-1])
    elif damage == "flipped":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        (second / "COMPLETE").unlink()
    assert choose_checkpoint("auto", tmp_path) == first
    warning = f"warning: {second} is damaged (model.safetensors has changed since it was written) and is left out\n"
    assert capsys.readouterr().err == ("" if damage == "not complete" else warning)
    if damage != "not complete":
        with pytest.raises(UserError, match=r"the checkpoint is damaged, model.safetensors has changed"):
            choose_checkpoint(str(second), tmp_path)


def test_damage_to_all_of_them_does_not_start_from_nothing(tmp_path: Path) -> None:
    for path in write(tmp_path, 9, 12):
        (path / "trainer.json").write_text("")
    with pytest.raises(UserError, match="none of the 2 checkpoints is intact"):
        choose_checkpoint("auto", tmp_path)


def test_what_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, 9)
    with pytest.raises(UserError, match="holds another run: choose another folder"):
        choose_checkpoint("never", tmp_path / "a")
    with pytest.raises(UserError, match=r"b holds another run than --resume .*/a"):
        choose_checkpoint(str(tmp_path / "a"), tmp_path / "b")
    with pytest.raises(UserError, match="neither a checkpoint nor a run with one"):
        choose_checkpoint(str(tmp_path / "c"), tmp_path / "d")


def test_what_has_changed_is_named_or_refused(tmp_path: Path) -> None:
    (path,) = write(tmp_path, 9)
    assert compare_configs(path, CONFIG) == {}
    changed = CONFIG | {"LEARNING_RATE": 0.2, "DATA": {"root": "b"}}
    assert compare_configs(path, changed) == {"LEARNING_RATE": (0.1, 0.2), "DATA.root": ("a", "b")}
    with pytest.raises(UserError, match=r"OPTIMIZER.name='sgd': .* was made with 'lamb'; keep that"):
        compare_configs(path, CONFIG | {"OPTIMIZER": {"name": "sgd"}})
    with pytest.raises(UserError, match=r"TOTAL_BATCH_SIZE=32: .* was made with 16; keep that"):
        compare_configs(path, CONFIG | {"TOTAL_BATCH_SIZE": 32})


def test_another_data_set_is_refused_unless_allowed(tmp_path: Path, capsys) -> None:
    (path,) = write(tmp_path, 9)
    check_data(path, DATA, False)
    check_data(path, DataSummary(60, 10, 3, fingerprint="repaired", earlier=("same",)), False)
    other = DataSummary(60, 10, 3, fingerprint="other")
    with pytest.raises(UserError, match=r"\(61 training images then, 60 now\).*--set DATA.allow_change=True"):
        check_data(path, other, False)
    assert capsys.readouterr().out == ""
    check_data(path, other, True)
    assert "another data set from here on" in capsys.readouterr().out


def ask(refuses: bool) -> object:
    def question() -> int:
        if refuses:
            raise UserError("no")
        return torch.distributed.get_rank() + 7

    with launched():
        try:
            return ask_first_rank(question)
        except AgreedError as error:
            return str(error)


def test_the_first_rank_answers_for_all() -> None:
    assert run_ranks(2, ask, False) == [7, 7]
    assert run_ranks(2, ask, True) == ["no", "no"]
