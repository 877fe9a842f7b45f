"""``--find-batch`` against the noise scale of the training before which it stands."""

import math
import os
import re
from unittest import mock

import numpy as np
import pytest

from common.config.plan import Plan
from common.engine.trainer import Trainer
from common.errors import UserError
from common.metrics.batch_finder import measure_growth, propose_batches
from common.metrics.metrics_file import read_metrics
from common.recording import RECORDINGS
from common.testing.tape import TapeRecording
from common.testing.tiny_task import train

SETTINGS = ("gradient_accumulation=2", "LOG.every=1")


def test_what_cannot_be_measured_is_said(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(RECORDINGS, "cpu", TapeRecording)
    train(data, tmp_path / "short", *SETTINGS, "GRAPHS=True", flags=["--find-batch", "1"])
    said = capsys.readouterr().out
    assert "no critical batch: the estimate of the true" in said
    assert "training runs without CUDA graphs: --find-batch\n" in said
    with pytest.raises(UserError, match="^--find-batch: the noise scale needs several micro-batch"):
        train(data, tmp_path / "single", flags=["--find-batch"])


def test_the_noise_scale_of_the_first_steps_gives_the_steps_of_other_batches(
    data, tmp_path, capsys
):
    with mock.patch.object(Trainer, "_eval", side_effect=AssertionError):
        output = train(data, tmp_path / "found", *SETTINGS, flags=["--find-batch", "9"])
    said = capsys.readouterr().out
    assert sorted(os.listdir(output)) == [".lock", "find_batch.csv"]
    rows = np.genfromtxt(output / "find_batch.csv", delimiter=",", names=True)
    found = rows["noise_scale"]
    trained = train(data, tmp_path / "trained", *SETTINGS)
    records = [record for record in read_metrics(trained) if record["kind"] == "train"]
    expected = [record["noise_scale"] or math.inf for record in records[:9]]
    assert found.tolist() == expected
    critical = found[-1]
    last_third = found[-3:]
    low = min(last_third) / critical
    high = max(last_third) / critical
    words = f"at step 9 ({low:.1f}x to {high:.1f}x over the last third)"
    name = "critical batch (the noise scale)"
    assert f"{name} about {critical:.2g} images {words}" in " ".join(said.split())
    # the run has 10 steps of 14 images, an epoch 70 images
    steps = 10 * (1 + critical / 64) / (1 + critical / 14)
    images = 64 * steps
    row = rf"\|\s+64 \|\s+{steps:.0f} \|\s+{images:,.0f} \|"
    ratios = rf"\s+{steps / 10:.2f} \|\s+{images / 140:.2f} \|"
    assert re.search(row + ratios, said)
    batches = re.findall(r"^\|\s+(\d+) \|", said, re.MULTILINE)
    assert batches == ["14", "16", "32", "64"]
    assert re.search(r"^BATCH_SIZES=\[(\(2, 7\))?\]$", said, re.MULTILINE)


def test_a_batch_is_proposed_that_follows_the_noise_scale():
    """It grows with the square root of the step, from 65 images at step 64."""
    plan = Plan(
        world_size=1,
        tensor_parallel=1,
        data_parallel=1,
        micro_batch=64,
        accumulation=4,
        total_batch=256,
        epochs=40,
        steps_per_epoch=64,
        warmup_steps=0,
        total_steps=2560,
        last_step=2560,
    )
    scales = [8.1 * step**0.5 for step in range(1, 65)]
    assert measure_growth(scales) == pytest.approx(0.5)
    # above 128 images at step 256, 256 at step 1,024; at first the least of the last third, 54
    assert propose_batches(scales, plan) == [(1, 32), (3, 64), (12, 128)]
    assert propose_batches([8.0] * 64, plan) == [(40, 16)]
    assert propose_batches([1e4] * 64, plan) == []
