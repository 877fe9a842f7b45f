"""Every benchmark with --tiny."""

import shutil
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import lamb
import loader
import pytest
import quickstart
import saving
import step
import torch

from common.errors import UserError
from common.tools.harness import Row
from common.tools.result_rows import read_records
from imagenet_dali import prepare
from imagenet_dali.testing import prepare_data, write_config

Run = Callable[..., list[Row]]


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
        assert all(row["wall_ms"] > 0 for row in record.rows if "not_run" not in row)
        return record.rows

    return run


@pytest.mark.slow
def test_step(run_tiny: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(step, "find_spec", lambda name: None)
    rows = run_tiny(step.main)
    expected = [(part, name) for part in ("training", "loop alone") for name in step.LOOPS]
    assert [(row["part"], row["variant"]) for row in rows] == expected
    assert [row.get("not_run") for row in rows] == [
        "not installed" if row["variant"] in step.PEERS else None for row in rows
    ]
    assert "| part | precision | threads |" in capsys.readouterr().out.replace("  ", "")


def test_lamb(run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    assert [row["variant"] for row in run_tiny(lamb.main, "--threads", "1")] == list(lamb.OPTIMIZERS)


def test_all_step_the_same_parameters() -> None:
    params = lamb.random_parameters(lamb.TINY, torch.device("cpu"))
    assert len(params) == 152
    before = [param.detach().clone() for param in params]
    for build in lamb.OPTIMIZERS.values():
        build(params, lr=1e-6, weight_decay=0.1).step()
    assert all((param != old).any() for param, old in zip(params, before, strict=True) if old.any())


def test_saving(run_tiny: Run) -> None:
    assert [row["variant"] for row in run_tiny(saving.main)] == ["copying", "writing"]


@pytest.mark.slow
@pytest.mark.timeout(600)  # eight trainings
def test_quickstart(run_tiny: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "WARMUP", 2)
    rows = run_tiny(quickstart.main, "--config", str(write_config(tmp_path)), "--data", str(prepare_data(tmp_path)))
    expected = [("to the first step", name) for name in ("warm", "without bytecode")]
    expected += [(part, name) for part in ("alone", "beside a busy process") for name in quickstart.WAITING]
    assert [(row["part"], row["variant"]) for row in rows] == expected
    with pytest.raises(UserError, match="failed: error: --config none: no such file or recipe"):
        run_tiny(quickstart.main, "--config", "none")


@pytest.mark.slow
def test_loader(run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    rows = run_tiny(loader.main)
    assert [row["variant"] for row in rows] == list(loader.LOADERS)
    assert [row["variant"] for row in rows if "not_run" in row] == ["webdataset"]


@pytest.mark.slow
def test_io(run_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_from_file_location("bench_io", Path(loader.__file__).with_name("io.py"))  # "io" is Python's own
    bench_io = module_from_spec(spec)
    spec.loader.exec_module(bench_io)
    monkeypatch.setattr(bench_io, "find_spec", lambda name: name == "torch")
    rows = run_tiny(bench_io.main)
    ours = [name for name in bench_io.LOADERS if name not in bench_io.PACKAGES]
    asked = {row["variant"]: row["requests_per_image"] for row in rows if row["part"] == "1 ms"}
    assert list(asked) == [name for name in ours if not name.startswith("DALI")]
    assert asked["torchvision, files"] == 1
    assert asked["ours, blocks"] < 1
    assert asked["ours, random"] == pytest.approx(1, abs=0.2)  # a few at its start and end
    assert [row["variant"] for row in rows if row["part"] == "cold"] == ours
    counted = {row["variant"]: row for row in rows if "strace" in row["part"]}
    assert list(counted) == (ours if shutil.which("strace") else [])
    for row in counted.values():
        assert row["opens_per_image"] == 1 or row["variant"] != "torchvision, files"


@pytest.mark.parametrize("main", [lamb.main, loader.main, quickstart.main, saving.main, step.main, prepare.main])
def test_help_fits_a_terminal(main: Callable[[list[str]], None], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--images", "100"], "--images 100: not a multiple of --batch 64"),
        (["--size", "9"], "--size 9: expected WIDTHxHEIGHT"),
    ],
)
def test_a_mistake_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        loader.main([*words, "--output", str(tmp_path / "none")])


def test_shards_and_folder_hold_the_images(tmp_path: Path) -> None:
    """Ours, from shards and from the folder: what was written is read, every image once."""
    loader.write_images(tmp_path, 8, 64, 48)
    work = loader.Work(tmp_path, batch=8, images=8)
    for name, root in (("torchvision", "images"), ("dali", "shards")):
        data = loader.open_ours(work, root, name)
        images, labels = next(iter(data))
        assert sorted(labels.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert (images.shape, images.dtype) == ((8, 3, 224, 224), torch.float32)
        data.close()
