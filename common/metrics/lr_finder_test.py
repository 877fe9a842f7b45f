"""The range test against the run before which it stands; a profile against the model's layers."""

import json
import math
import os
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from common.engine.trainer import Trainer
from common.metrics.lr_finder import LearningRateFinder, suggest_rate
from common.metrics.metrics_file import read_metrics
from common.recording import RECORDINGS
from common.testing.ranks import run_ranks
from common.testing.tape import TapeRecording
from common.testing.tiny_task import MODEL, train


def find(data: Path, output: Path, *settings: str, steps: int = 3) -> None:
    with mock.patch.object(Trainer, "_eval", side_effect=AssertionError):
        train(data, output, *settings, flags=["--find-lr", str(steps)])


def read_rows(output: Path) -> np.ndarray:
    return np.genfromtxt(output / "find_lr.csv", delimiter=",", names=True)


def test_rates_grow_evenly_from_the_loss_of_the_run_until_it_diverges(data, tmp_path, capsys):
    settings = [
        "gradient_accumulation=2",
        "fp16.mode=AMP_TYPE.TORCH",
        "LOG.every=1",
    ]
    found = tmp_path / "found"
    find(data, found, *settings, steps=40)  # over ends of epochs
    rows = read_rows(found)
    said = capsys.readouterr().out
    assert " 40 steps instead of training; nothing is saved but find_lr.png and" in f" {said}"
    assert sorted(os.listdir(found)) == [".lock", "find_lr.csv", "find_lr.png"]
    rates = [10 ** (-5 + 6 * k / 39) for k in range(len(rows))]
    assert rows["learning_rate"] == pytest.approx(rates)

    trained = train(data, tmp_path / "trained", *settings)
    first = read_metrics(trained)[0]
    assert rows[0]["loss"] == first["loss"]
    assert rows[0]["smoothed"] == pytest.approx(first["loss"], rel=1e-12)

    smoothed = rows["smoothed"]
    best = rates[smoothed.argmin()]
    assert said.endswith(
        f"a tenth of {best:.1e}, where the smoothed loss is lowest\nLEARNING_RATE={best / 10:.1e}\n"
    )
    assert 20 < len(rows) < 40
    lowest_so_far = np.minimum.accumulate(smoothed)
    diverged = ~(smoothed < 4 * lowest_so_far)
    last = len(rows) - 1
    assert np.flatnonzero(diverged).tolist() == [last]


def test_layer_decay_scales_the_rates_of_the_test_too(tmp_path):
    low = {"lr": 0.0, "initial_lr": 0.1 * 0.65}  # WARMUP_LR=0 sets such rates
    high = {"lr": 0.1}
    optimizer = SimpleNamespace(param_groups=[low, high])
    engine = SimpleNamespace(optimizer=optimizer)
    trainer: Any = SimpleNamespace(engine=engine, device="cpu")
    finder = LearningRateFinder(tmp_path, 5, is_main=True)
    finder.before_train(trainer)
    assert low["lr"] == pytest.approx(0.65e-5)
    assert high["lr"] == pytest.approx(1e-5)


@pytest.mark.parametrize("settings", [(), ("TENSOR_PARALLEL_SIZE=2", "TENSOR_PARALLEL_MODE='1d'")])
def test_two_ranks_find_what_one_does(data, tmp_path, settings):
    run_ranks(2, find, data, tmp_path / "two", *settings)
    find(data, tmp_path / "one")
    two = read_rows(tmp_path / "two")
    one = read_rows(tmp_path / "one")
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("deviations", "expected"),
    [
        (1.2, None),
        (1.4, 0.01),
    ],
)
def test_a_loss_that_falls_by_less_than_its_noise_suggests_nothing(deviations, expected):
    losses = [1.1, 0.9, 1.1, 0.9, 1.2]
    noise = [dict(loss=loss, smoothed=1.0) for loss in losses]
    least = statistics.mean(losses) - deviations * statistics.stdev(losses)
    lowest = dict(learning_rate=0.1, loss=least, smoothed=least)
    assert suggest_rate([*noise, lowest, *noise]) == expected


def test_a_loss_that_is_nan_suggests_nothing():
    assert suggest_rate([dict(loss=math.nan, smoothed=math.nan)]) is None


def test_a_profile_has_the_steps_asked_for_and_leaves_no_run(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(RECORDINGS, "cpu", TapeRecording)
    output = train(
        data,
        tmp_path / "run",
        "gradient_accumulation=2",
        # the whole batch at once, of TOTAL_BATCH_SIZE
        "IMAGE_SIZES=[(1, 8, 14)]",
        "BATCH_SIZES=[(1, 7)]",
        "GRAPHS=True",
        flags=["--profile", "2"],
    )
    trace = json.loads((output / "profile" / "trace.json").read_text())
    names = [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [name for name in names if name.startswith("ProfilerStep#")]
    assert len(steps) == 2
    # qkv, projection and two layers of the MLP in a block, the patch embedding, and the head
    linear_layers = 4 * MODEL["depth"] + 2
    assert names.count("aten::linear") == 2 * linear_layers
    table = (output / "profile" / "operators.txt").read_text()
    said = capsys.readouterr().out
    assert "\nIMAGE_SIZES: 8 pixels in all steps; evaluation at full size\n" in said
    assert table in said
    assert "training runs without CUDA graphs: --profile\n" in said
    assert sorted(os.listdir(output)) == [".lock", "profile"]
