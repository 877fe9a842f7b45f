"""Results that cannot be written: one line and exit status 2, and what was there before stays."""

import os
import resource
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from common.testing.commands import run_forked
from common.tools import evaluate, export, predict, report

TOO_LITTLE = 10_000  # bytes of a file: less than any result here, more than what is printed


def with_small_files(argv: list[str]) -> None:
    """Run a tool where the kernel refuses what is beyond `TOO_LITTLE` bytes of a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (TOO_LITTLE, resource.RLIM_INFINITY))
    TOOLS[argv[0]].main(argv[1:])


def with_a_full_output(argv: list[str]) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    TOOLS[argv[0]].main(argv[1:])


TOOLS: dict[str, ModuleType] = {
    "evaluate": evaluate,
    "export": export,
    "predict": predict,
    "report": report,
}


@pytest.fixture
def images(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The short names of 115 images in the current folder."""
    monkeypatch.chdir(tmp_path)
    paths = sorted(data.rglob("*.png"))
    return [shutil.copy(path, f"{number}.png") for number, path in enumerate(paths)]


@pytest.mark.parametrize("name", ["a.npy", "a.parquet"])
def test_features(run, images, name):
    Path(name).write_text("features of yesterday")
    before = set(os.listdir())
    words = ["predict", run, *images, "--features", name]
    ended = run_forked(with_small_files, words, 2)
    # the checkpoint, and an answer for each image
    assert len(ended.stdout.splitlines()) == 1 + len(images)
    assert ended.stderr.startswith(f"error: {name}: cannot be written (")
    assert ended.stderr.endswith("; free space or choose another place\n")
    assert Path(name).read_text() == "features of yesterday"
    assert set(os.listdir()) == before


@pytest.mark.parametrize(("name", "size"), [("evaluation.json", 3000), ("confusion.png", 10_000)])
def test_an_evaluation(run, tmp_path, name, size, monkeypatch):
    monkeypatch.setattr("common.tools.full_disk_test.TOO_LITTLE", size)
    (tmp_path / name).write_text("of yesterday")
    # evaluation.json, which has the command, is longer than what is printed
    long = f"--set=DATA.mean=({0.5:.3000f},0.5,0.5)"
    words = ["evaluate", run, "--output", tmp_path, long]
    ended = run_forked(with_small_files, words, 2)
    line = f"error: {tmp_path / name}: cannot be written (File too large); free space or choose"
    assert ended.stderr.startswith(line)
    for figure in ("| macro_f1 ", "| top1 ", "| loss ", "all 7 classes, the lowest recall first"):
        assert figure in ended.stdout
    assert (tmp_path / name).read_text() == "of yesterday"
    assert not list(tmp_path.glob(".*"))


def test_a_report(run, tmp_path):
    page = tmp_path / "report.html"
    page.write_text("of yesterday")
    ended = run_forked(with_small_files, ["report", run, "--output", page], 2)
    assert ended.stderr == (
        f"error: {page}: cannot be written (File too large); free space or choose another place\n"
    )
    assert page.read_text() == "of yesterday"
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.parametrize(
    "target", ["timm", "safetensors", pytest.param("onnx", marks=pytest.mark.slow)]
)
def test_an_export_can_be_repeated(run, target, tmp_path):
    words = ["export", run, "--to", target, "--output", tmp_path / "out"]
    ended = run_forked(with_small_files, words, 2)
    assert f"{tmp_path}/out: cannot be written (File too large); free" in ended.stderr
    assert list((tmp_path / "out").iterdir()) == []
    if target == "timm":
        export.main([*map(str, words[1:])])


@pytest.mark.parametrize(
    "words", [["predict", "RUN", "0.png", "--json"], ["report", "RUN", "--csv"]]
)
def test_standard_output(run, images, words):
    words = [str(run) if word == "RUN" else word for word in words]
    ended = run_forked(with_a_full_output, words, 2)
    line = "output cannot be written (No space left on device); free space or write elsewhere"
    assert ended.stderr == f"error: {line}\n"
