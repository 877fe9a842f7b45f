"""Every loop that scripts/gpu.py times runs on a CPU, and warm-up is not counted."""

import json
from types import SimpleNamespace

import gpu
import pytest
import testing as timed_steps

from common.testing.ranks import run_ranks


def test_the_warm_up_is_not_timed(monkeypatch):
    taken = []
    monkeypatch.setattr(timed_steps, "time", SimpleNamespace(perf_counter=lambda: sum(taken)))
    work = timed_steps.Work((), steps=2, warm_up=1)
    for _, seconds in zip(work, (9.0, 0.5, 1.5, 9.0), strict=True):
        taken.append(seconds)
    assert work.seconds == 1.0


@pytest.mark.parametrize("train", [timed_steps.ours, timed_steps.bare, timed_steps.timm])
def test_a_step_is_timed(train, tmp_path, monkeypatch):
    changed = dict(TINY=True, OUT=tmp_path, ROWS=tmp_path / "rows", MODELS={"lite": gpu.SMALL})
    for name, value in changed.items():
        monkeypatch.setattr(gpu, name, value)
    run_ranks(1, gpu.measure_step, "lite", "the loop", train, False)  # a run changes its process
    row = json.loads(gpu.ROWS.read_text())
    assert row["ms"] > 0, row
    assert (row["variant"], row["batch"]) == ("the loop", gpu.BATCH)
