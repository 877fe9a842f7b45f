"""Every benchmark at its smallest."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import lamb
import loader
import loaders
import pytest
import saving
import start
import start_traced
import step
import torch
import waiting
from loaders import Work

from common.errors import UserError
from common.tools.harness import Row
from common.tools.result_rows import read_records
from imagenet_dali.testing import prepare_data, write_config

Run = Callable[..., list[Row]]
PARTS = ("training", "evaluation", "loop alone")


@pytest.fixture
def run_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what runs a benchmark's main and returns the rows that it writes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(main: Callable[[list[str]], None], *arguments: str) -> list[Row]:
        path = tmp_path / "results.jsonl"
        main(["--tiny", "--output", str(path), *arguments])
        (record,) = read_records(path)
        assert record.status == "complete"
        assert record.run["tiny"]
        return record.rows

    return run


@pytest.mark.slow
def test_step(run_tiny: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(step, "find_spec", lambda name: None)
    rows = run_tiny(step.main)
    variants = {part: [row["variant"] for row in rows if row["part"] == part] for part in PARTS}
    assert variants == {
        "training": list(step.LOOPS), "evaluation": list(step.EVALUATIONS), "loop alone": list(step.LOOPS)
    }  # fmt: skip
    for row in rows:
        if row["variant"] in step.PEERS:
            assert row["not_run"] == "not installed"
        else:
            assert row["wall_ms"] > 0
    assert "| part | precision |" in capsys.readouterr().out.replace("  ", "")


def test_lamb(run_tiny: Run) -> None:
    threads = torch.get_num_threads()
    try:
        rows = run_tiny(lamb.main, "--threads", "1")
    finally:
        torch.set_num_threads(threads)
    assert [row["variant"] for row in rows] == list(lamb.OPTIMIZERS)
    assert all(row["wall_ms"] > 0 for row in rows)


def test_all_step_the_same_parameters() -> None:
    params = lamb.random_parameters(lamb.TINY, torch.device("cpu"))
    assert len(params) == 152
    before = [param.detach().clone() for param in params]
    for build in lamb.OPTIMIZERS.values():
        build(params, lr=1e-6, weight_decay=0.1).step()
    assert all((param != old).any() for param, old in zip(params, before, strict=True) if old.any())


def test_saving(run_tiny: Run) -> None:
    rows = run_tiny(saving.main)
    assert [row["variant"] for row in rows] == ["copying", "writing"]


@pytest.mark.slow
def test_start(run_tiny: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process, once: its stages are there; the table is made of them and of given times."""
    config, shards = write_config(tmp_path), prepare_data(tmp_path)
    stages = start.trace(["--config", str(config), "--set", f"DATA.root={shards}", "--set", "MAX_STEPS=1"])
    assert set(start_traced.STAGES.values()) < set(stages)
    assert all(stage["wall"] >= 0 for stage in stages.values())
    assert stages["all"]["wall"] > stages["importing torch"]["wall"] > 0
    monkeypatch.setattr(start, "trace", lambda settings: stages)
    monkeypatch.setattr(start, "first_step", lambda settings, bytecode: {"wall": 2.0 if bytecode else 5.0})
    rows = run_tiny(start.main)
    assert [(row["variant"], row["x_wall"]) for row in rows[:2]] == [("warm", 1.0), ("without bytecode", 2.5)]
    assert [row["variant"] for row in rows[2:]] == list(stages)


def test_start_tells_what_failed() -> None:
    with pytest.raises(UserError, match="failed: out of disk"):
        start.run([sys.executable, "-c", "raise SystemExit('out of disk')"], os.environ)


@pytest.mark.slow
def test_loader(run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    rows = run_tiny(loader.main)
    assert [row["variant"] for row in rows] == [*loader.LOADERS, "a training step", "its data"]
    assert all("not_run" in row if row["variant"] == "webdataset" else row["wall_ms"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--images", "100"], "--images 100: not a multiple of --batch 64"), (["--size", "9"], "--size 9: write it as")],
)
def test_a_mistake_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        loader.main([*words, "--output", str(tmp_path / "none")])


def test_shards_and_folder_hold_the_images(tmp_path: Path) -> None:
    """Ours, from shards and from the folder: what was written is read, every image once."""
    loader.write_images(tmp_path, 8, 64, 48)
    work = Work(tmp_path, batch=8, images=8)
    for name, root in (("torchvision", "images"), ("dali", "shards")):
        data = loaders._ours(work, root, name)
        images, labels = next(iter(data))
        assert sorted(labels.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert (images.shape, images.dtype) == ((8, 3, 224, 224), torch.float32)
        data.close()


@pytest.mark.slow
def test_waiting(run_tiny: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, shards = write_config(tmp_path), prepare_data(tmp_path)
    monkeypatch.setattr(waiting, "WARMUP", 2)
    rows = run_tiny(waiting.main, "--config", str(config), "--data", str(shards))
    parts = ("alone", "beside a busy process")
    assert [(row["part"], row["variant"]) for row in rows] == [
        (part, name) for part in parts for name in waiting.WAITING
    ]
    assert all(row["wall_ms"] > 0 for row in rows)
