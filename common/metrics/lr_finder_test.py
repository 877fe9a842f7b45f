"""The learning-rate range test, against the run that it stands before."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from common.metrics.lr_finder import LearningRateFinder, fall_and_noise, suggest_rate
from common.metrics.writers import read_metrics
from common.testing.ranks import run_ranks
from common.testing.tiny_task import train, write_images


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


def read_rows(output: Path) -> list[dict[str, float]]:
    with (output / "find_lr.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def test_rates_grow_evenly_from_the_loss_of_the_run_and_nothing_else_is_left(images, tmp_path, capsys):
    settings = ("gradient_accumulation=2", "fp16.mode=AMP_TYPE.TORCH", "LOG.every=1")
    rows = read_rows(train(images, tmp_path / "found", *settings, flags=["--find-lr", "25"]))  # over two ends of epochs
    last_line = capsys.readouterr().out.splitlines()[-1]
    first = read_metrics(train(images, tmp_path / "trained", *settings))[0]
    assert [row["learning_rate"] for row in rows] == pytest.approx([10 ** (-5 + k / 4) for k in range(len(rows))])
    assert rows[0]["loss"] == first["loss"] == pytest.approx(rows[0]["smoothed"], rel=1e-12)
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == [".lock", "find_lr.csv", "find_lr.png"]
    least = min(rows, key=lambda row: row["smoothed"])
    assert last_line == f"LEARNING_RATE={least['learning_rate'] / 10:.1e}"
    with Image.open(tmp_path / "found" / "find_lr.png") as picture:
        assert picture.size == (1200, 750)


def test_layer_decay_scales_the_rates_of_the_test_too(tmp_path: Path) -> None:
    groups = [{"lr": 0.1 * 0.65}, {"lr": 0.1}]
    trainer: Any = SimpleNamespace(engine=SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups)), device="cpu")
    LearningRateFinder(tmp_path, 5, is_main=True).before_train(trainer)
    assert [group["lr"] for group in groups] == pytest.approx([0.65e-5, 1e-5])


def test_ends_where_the_loss_diverges(images, tmp_path):
    rows = read_rows(train(images, tmp_path / "run", flags=["--find-lr", "40"]))
    smoothed = [row["smoothed"] for row in rows]
    assert 20 < len(rows) < 40
    diverged = [not value < 4 * min(smoothed[: number + 1]) for number, value in enumerate(smoothed)]
    assert diverged == [False] * (len(rows) - 1) + [True]


def find(images: Path, output: Path, *settings: str) -> None:
    train(images, output, *settings, flags=["--find-lr", "3"])


@pytest.mark.parametrize("mode", [None, "1d"])
def test_two_ranks_find_what_one_does(images, tmp_path, mode):
    settings = ("TENSOR_PARALLEL_SIZE=2", f"TENSOR_PARALLEL_MODE={mode}") if mode else ()
    run_ranks(2, find, images, tmp_path / "two", *settings)
    find(images, tmp_path / "one")
    two, one = read_rows(tmp_path / "two"), read_rows(tmp_path / "one")
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-5)


def test_goes_by_the_smoothed_loss_and_never_by_one_that_is_not_finite():
    losses = [2.0, 1.0, 1.5, math.nan]
    rows = [dict(learning_rate=10.0**k, loss=0.0, smoothed=loss) for k, loss in enumerate(losses)]
    assert suggest_rate(rows) == pytest.approx(1.0)
    assert suggest_rate(rows[3:]) == pytest.approx(100.0)


@pytest.mark.parametrize("losses", [[2.0, 2.2, 1.9, 2.1, 1.98], [2.0]])
def test_a_curve_within_its_noise_suggests_nothing(losses, tmp_path, capsys):
    finder = LearningRateFinder(tmp_path, 5, is_main=True)
    finder.rows = [dict(learning_rate=1e-3, loss=loss, smoothed=2 - 0.01 * n) for n, loss in enumerate(losses)]
    finder.after_train(None)
    assert "no suggestion: the loss falls by less than 3 times its noise of" in capsys.readouterr().out


def test_noise_alone_suggests_nothing():
    """The smoothed loss is least by chance somewhere; its fall is compared with the noise of both ends."""
    random, found = torch.Generator().manual_seed(0), 0
    for losses in torch.randn(300, 120, generator=random, dtype=torch.float64).tolist():
        average, rows = 0.0, []
        for number, loss in enumerate(losses, 1):
            average = 0.9 * average + 0.1 * loss
            rows.append(dict(loss=loss, smoothed=average / (1 - 0.9**number)))
        fall, noise = fall_and_noise(rows)
        found += fall > 3 * noise
    assert found < 15


def test_noise_is_that_of_the_exponential_average_and_of_the_first_tenth():
    losses = torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    average, smoothed = 0.0, []
    for loss in losses:
        average = 0.9 * average + 0.1 * loss
        smoothed.append(average)
    rows = [dict(loss=loss, smoothed=0.0) for loss in losses]
    rows[-1]["smoothed"] = -1.0
    fall, noise = fall_and_noise(rows)
    assert noise == pytest.approx(math.hypot(torch.tensor(smoothed[100:]).std().item(), 2000**-0.5), rel=0.05)
    assert fall == pytest.approx(1 + sum(losses[:2000]) / 2000)
