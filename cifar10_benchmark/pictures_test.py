"""The program draws the pictures and prints the tables that docs/batch-study.md has."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from cifar10_benchmark import pictures
from common.files import ROOT

SIZES = {"top1_by_time.png": (700, 450), "growing.png": (1200, 430), "noise_scale.png": (800, 500)}


def tables(text: str) -> list[list[list[str]]]:
    """Return the cells of each table's rows, without its header."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    found, before = [], []
    for row in rows:
        if row and not before:
            found.append([])
        elif row and set(row[0]) != {"-"}:
            found[-1].append(row)
        before = row
    return found


def start(monkeypatch, capsys, *argv: str) -> str:
    monkeypatch.setattr(sys, "argv", ["pictures.py", *argv])
    pictures.main()
    return capsys.readouterr().out


def sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Return width and height of each picture by name."""
    found = {}
    for path in folder.glob("*.png"):
        with Image.open(path) as picture:
            found[path.name] = picture.size
    return found


@pytest.fixture
def page() -> list[list[list[str]]]:
    """Return the tables of the study, of growing batches and of both noise scales."""
    return tables((ROOT / "docs" / "batch-study.md").read_text())


def write_run(folder: Path, scales: dict[str, list[str]]) -> None:
    """Write records with the figures of rows: after epochs, then of the medians."""
    rows = []
    for key, cells in scales.items():
        after, (late, *run) = cells[:4], cells[4:-2]
        whole = run[0] if run else late
        # The median of the last third is the middle one of three, of all that of the many.
        epochs = [1, 2, *[3] * 20, 5, 6, 8, 9, 10]
        figures = [*after[:2], *[whole] * 20, after[2], "1", "1", late, after[3]]
        for epoch, figure in zip(epochs, figures, strict=True):
            number = int(figure.replace(",", ""))
            rows.append({"kind": "train", "epoch": epoch, "noise_scale": None, key: number})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_pictures_and_tables(tmp_path, monkeypatch, capsys, page):
    printed = start(monkeypatch, capsys, f"--output={tmp_path}", f"--noise={tmp_path / 'none'}")
    assert tables(printed) == page[:2]
    assert "none lacks adamw-256, adamw-1024, lamb-256" in printed
    assert sizes(tmp_path) == {name: SIZES[name] for name in ("top1_by_time.png", "growing.png")}


def test_the_noise_scales_of_runs_beside_the_study(tmp_path, monkeypatch, capsys, page):
    runs = {}
    for key, rows in zip(("noise_scale", "optimizer_noise_scale"), page[2:], strict=True):
        for run, *cells in rows:
            runs.setdefault(run, {})[key] = cells
    for run, scales in runs.items():
        name = run.lower().replace(", ", "-").replace(",", "")
        write_run(tmp_path / "runs" / name, scales)
    printed = start(monkeypatch, capsys, f"--output={tmp_path}", f"--noise={tmp_path / 'runs'}")
    assert tables(printed) == page
    assert sizes(tmp_path) == SIZES
