"""Every loop that scripts/gpu.py times runs on a CPU, and warm-up is not counted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu
import pytest
import testing as timed_steps

from common.testing.ranks import run_ranks, slow


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_warm_up_is_not_timed(accumulation):
    taken = []
    work = timed_steps.Work(
        (),
        steps=2,
        warm_up=1,
        clock=lambda: sum(taken),
        accumulation=accumulation,
    )
    items = iter(work)
    for seconds in (9.0, 0.5, 1.5, 9.0):
        for _ in range(accumulation):
            next(items)
            taken.append(seconds / accumulation)
    assert next(items, "ended") == "ended"
    assert work.seconds == 1.0


def test_variants_are_timed_in_turn_and_compared_with_the_first(monkeypatch, capsys):
    seconds = iter([4e-3, 5e-3, 6e-3, 6e-3, 5e-3, 10e-3])
    timed = []

    def train(work: timed_steps.Work) -> None:
        print("what a run prints")
        timed.append(work.settings)
        work.seconds = next(seconds)

    monkeypatch.setattr(timed_steps, "ours", train)
    timed_steps.main(["EMA=0.9", "EMA=0.9 KEEP=2", "--rounds=3"])
    one_round = [("EMA=0.9",), ("EMA=0.9", "KEEP=2")]
    assert timed == one_round * 3
    # the ratios are 5/4, 6/6, 10/5
    assert capsys.readouterr().out.splitlines() == [
        "   5.00 ms  x 1.000  EMA=0.9",
        "   6.00 ms  x 1.250  EMA=0.9 KEEP=2",
    ]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Make the pieces small, with their rows and work in a folder of the test."""
    monkeypatch.setattr(gpu, "TINY", True)
    monkeypatch.setattr(gpu, "OUT", tmp_path)
    monkeypatch.setattr(gpu, "ROWS", tmp_path / "rows")
    monkeypatch.setattr(gpu, "WORK", tmp_path)
    monkeypatch.setattr(gpu, "MODELS", {"lite": gpu.SMALL})


def read_rows(path: Path) -> list[dict]:
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_calls_have_known_pieces():
    for groups, _ in gpu.CALLS.values():
        for names in groups:
            assert {*names} <= gpu.PIECES.keys()


def test_the_parts_of_a_step_are_timed(tiny, monkeypatch):
    steps = []

    def measure_step(model: str, variant: str, *_: object) -> None:
        steps.append(variant)

    monkeypatch.setattr(gpu, "BATCH", 8)
    monkeypatch.setattr(gpu, "measure_step", measure_step)
    gpu.lite()
    assert {"ours", "bare PyTorch", "ours, not compiled"} <= set(steps)
    times = {row["variant"]: row["ms"] for row in read_rows(gpu.ROWS)}
    # Which is slower is no test: machines are busy.
    assert times["batches, autoaugment=cifar10"] > 0
    assert times["batches, autoaugment=None"] > 0


def test_a_profile_counts_kernels_and_the_time_in_which_any_runs(tiny, tmp_path, monkeypatch):
    def event(category: str, start: float, duration: float) -> dict:
        return {"cat": category, "ts": 1000 + start, "dur": duration}

    # two streams; 15 microseconds of nothing; a copy
    events = [
        event("gpu_memcpy", 30, 5),
        event("kernel", 5, 10),
        event("kernel", 0, 10),
        event("cpu_op", 0, 90),
        {"name": "process_name"},
    ]
    path = tmp_path / "profile" / "profile" / "trace.json"
    path.parent.mkdir(parents=True)

    def write_trace(*_: object) -> None:
        path.write_text(json.dumps({"traceEvents": events}))

    monkeypatch.setattr(gpu, "cifar", write_trace)
    gpu.profile()
    (row,) = read_rows(gpu.ROWS)
    assert row["kernels"] == 3 / 5  # of five steps
    assert row["ms"] == pytest.approx(35e-3 / 5)
    assert row["busy_ms"] == pytest.approx(20e-3 / 5)


@pytest.mark.parametrize("train", [timed_steps.ours, timed_steps.bare, timed_steps.timm])
def test_a_step_is_timed(train, tiny):
    run_ranks(1, gpu.measure_step, "lite", "the loop", train, False)  # a run changes its process
    (row,) = read_rows(gpu.ROWS)
    assert row["ms"] > 0, row
    assert row["variant"] == "the loop"
    assert row["batch"] == gpu.BATCH


LOADS = (
    "nothing",
    "a thread",
    "a thread and the reader's process",
    "a process",
    "a thread, switch interval 0.5 ms",
)
# Of each piece a field of its rows, and the value of each row.
ROWS = {
    "dali-rates": ("threads", [16, 16, 12]),
    "dali-feed": ("apart", [False, True]),
    "dali-lock": ("beside", [*LOADS]),
    "dali-lock-s16": ("variant", [f"beside {name}" for name in LOADS]),
    "dali-workers": ("step", 4 * [1, 2, 3, 4]),
}


@pytest.mark.parametrize(
    "piece",
    [
        "dali-rates",
        slow("dali-feed"),
        slow("dali-lock"),
        slow("dali-lock-s16"),
        slow("dali-workers"),
    ],
)
def test_a_piece_of_dali_runs_on_a_cpu(piece, tmp_path):
    environ = os.environ | {
        "TINY": "1",
        "OUT": str(tmp_path),
        "GPU_WORK": str(tmp_path),
    }
    command = [sys.executable, gpu.__file__, "piece", piece]
    subprocess.run(command, env=environ, check=True, timeout=240)
    rows = read_rows(tmp_path / "rows.jsonl")
    for row in rows:
        assert "error" not in row
    field, values = ROWS[piece]
    assert [row[field] for row in rows] == values
