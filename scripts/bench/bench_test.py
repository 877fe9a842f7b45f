"""The table, and every benchmark at its smallest."""

import contextlib
import csv
import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lamb
import loader
import loaders
import pytest
import start
import start_traced
import step
import table
import torch
from loaders import Work

from common.errors import UserError
from imagenet_dali.testing import prepare_data, write_config

Rows = list[dict[str, str]]


@pytest.fixture
def run_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rows]:
    """Return what runs a benchmark's main and returns the rows that it adds to its table."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(main: Callable[[list[str]], None], *arguments: str) -> Rows:
        path = tmp_path / "results.csv"
        main(["--tiny", "--csv", str(path), *arguments])
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    return run


def test_ratios_are_of_the_same_round() -> None:
    figures = {
        "a": [{"cpu": cpu, "wall": 2 * cpu} for cpu in (1.0, 2.0, 9.0)],
        "b": [{"cpu": cpu, "wall": cpu} for cpu in (2.0, 3.0, 36.0)],
        "c": None,
        "d": [{"wall": 3.0}, {"wall": 4.0}, {"wall": 5.0}],
    }
    a, b, c, d = table.summarise(figures, "a", units=10)
    assert (a["cpu_ms"], a["x_cpu"], a["wall_ms"]) == ("200.0", "1.0000", "400.0")
    assert (b["cpu_ms"], b["cpu_quartiles"]) == ("300.0", "250.0 to 1950.")
    assert (b["x_cpu"], b["x_cpu_quartiles"], b["x_wall"]) == ("2.0000", "1.7500 to 3.0000", "1.0000")
    assert (c["cpu_ms"], c["x_cpu"], c["rounds"]) == ("not installed", "", "0")
    assert (d["cpu_ms"], d["wall_ms"], d["x_wall"]) == ("", "400.0", "1.0000")


def test_results_are_added_with_what_makes_them_count(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [{"variant": "a", "cpu_ms": "1"}]
    for part in ("first", "second"):
        table.report("step", part, rows, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [(row["part"], row["cpu_ms"]) for row in read] == [("first", "1"), ("second", "1")]
    assert f"torch={torch.__version__.partition('+')[0]}" in read[0]["versions"]
    assert all(read[0][column] for column in ("date", "hardware", "commit"))
    assert read[0]["command"].startswith("python scripts/bench/step.py")
    assert "| variant | cpu_ms |" in capsys.readouterr().out


def test_step(run_tiny, monkeypatch) -> None:
    monkeypatch.setattr(step, "find_spec", lambda name: None)
    rows = run_tiny(step.main)
    variants = {part: [row["variant"] for row in rows if row["part"] == part] for part in ("training", "evaluation")}
    assert variants == {"training": list(step.LOOPS), "evaluation": list(step.EVALUATIONS)}
    for row in rows:
        if row["variant"] in step.PEERS:
            assert row["wall_ms"] == "not installed"
        else:
            assert float(row["wall_ms"]) > 0
    (share,) = [float(row["x_wall"]) for row in rows if row["variant"] == "our hooks in it"]
    assert 0 < share < 1


def test_share_of_hooks() -> None:
    """Ten seconds of training with one in hooks; evaluation: 2 s in two batches, 0.5 in hooks; 3 s of curves."""
    job = step.Job(("TOTAL_BATCH_SIZE=50000",), steps=1, rounds=1, data=None)
    train = {"wall": 10.0, "after_train_iter": 1.0}
    test = {"wall": 2.0, "after_test_iter": 0.5, "after_test": 3.0}
    shares = step.share_of_hooks([train], [test], job, replace(job, steps=2))
    assert shares["our hooks in it"][0] == pytest.approx({"wall": 1 + 0.5 * 0.1 + 3})
    assert shares["an epoch"][0] == pytest.approx({"wall": 10 + 2 * 0.1 + 3})


def test_lamb(run_tiny) -> None:
    threads = torch.get_num_threads()
    try:
        rows = run_tiny(lamb.main, "--threads", "1")
    finally:
        torch.set_num_threads(threads)
    assert [row["variant"] for row in rows] == 2 * list(lamb.OPTIMIZERS)
    assert all(float(row["wall_ms"]) > 0 for row in rows)


def test_all_step_the_same_parameters() -> None:
    params = lamb.random_parameters(lamb.TINY, torch.device("cpu"))
    assert len(params) == 152
    before = [param.detach().clone() for param in params]
    for build in lamb.OPTIMIZERS.values():
        build(params, lr=1e-6, weight_decay=0.1).step()
    assert all((param != old).any() for param, old in zip(params, before, strict=True) if old.any())


def test_start(run_tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """A real process, once: its stages are there; the table is made of them and of given times."""
    config, shards = write_config(tmp_path), prepare_data(tmp_path)
    stages = start.trace(["--config", str(config), "--set", f"DATA.root={shards}", "--set", "MAX_STEPS=1"])
    assert set(start_traced.STAGES.values()) < set(stages)
    assert all(stage["wall"] >= 0 for stage in stages.values())
    assert stages["all"]["wall"] > stages["importing torch"]["wall"] > 0
    monkeypatch.setattr(start, "trace", lambda settings: stages)
    monkeypatch.setattr(start, "first_step", lambda settings, bytecode: {"wall": 2.0 if bytecode else 5.0})
    rows = run_tiny(start.main)
    assert [(row["variant"], row["x_wall"]) for row in rows[:2]] == [("warm", "1.0000"), ("without bytecode", "2.5000")]
    assert [row["variant"] for row in rows[2:]] == list(stages)


def test_start_tells_what_failed() -> None:
    with pytest.raises(UserError, match="failed: out of disk"):
        start.run([sys.executable, "-c", "raise SystemExit('out of disk')"], os.environ)


def test_loader(run_tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    rows = run_tiny(loader.main)
    assert [row["variant"] for row in rows] == [*loader.LOADERS, "a training step", "its data"]
    for row in rows:
        assert row["cpu_ms"] == "not installed" if row["variant"] == "webdataset" else float(row["wall_ms"]) > 0


def test_part_of_a_batch_is_refused() -> None:
    with pytest.raises(UserError, match="--images 100: not a multiple of --batch 64"):
        loader.main(["--images", "100"])


def test_shards_and_folder_hold_the_images(tmp_path: Path) -> None:
    """Ours, from shards and from the folder: what was written is read, every image once."""
    with contextlib.redirect_stdout(io.StringIO()):
        loader.write_images(tmp_path, 8, 64, 48)
    work = Work(tmp_path, batch=8, images=8)
    read = {}
    for name, root in (("torchvision", "images"), ("dali", "shards")):
        data = loaders._ours(work, root, name)
        read[name], labels = next(iter(data))
        assert sorted(labels.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
        data.close()
    assert all(images.shape == (8, 3, 224, 224) and images.dtype == torch.float32 for images in read.values())
