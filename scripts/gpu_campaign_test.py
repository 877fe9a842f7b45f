"""The campaign with pieces of this file; marked `campaign`: every real piece with --tiny, on a CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gpu_campaign
import pytest
import torch
from gpu import cifar10, job, memory, numerics
from gpu.job import Job
from torch import Tensor

from common.checkpoint import hook as checkpoint_hook
from common.colossal import Trainer
from common.errors import UserError
from common.metrics.hook import MetricsHook
from common.tools.harness import NotRunError, Row, UnfinishedError, run_piece
from common.tools.result_rows import Record, read_records

SCRIPT = Path(__file__).with_name("gpu_campaign.py")
WAITS = "the host waits at gpu_campaign_test.py:"
Call = Callable[..., tuple[int, list[Record]]]


def good(job: Job) -> Iterator[Row]:
    """Go well."""
    yield {"process": os.getpid(), "share": 1 / 3}
    yield {"range": [1.0, 2.0], "not_run": "a reason"}


def wrong(job: Job) -> Iterator[Row]:
    yield {"figure": 2, "wrong": "2 is not 3"}


def without_data(job: Job) -> Iterator[Row]:
    raise NotRunError("no data")
    yield {}


def long(job: Job) -> Iterator[Row]:
    """Take two calls."""
    mark = job.folder / "mark"
    if not mark.exists():
        mark.touch()
        raise UnfinishedError("half of it; the next call resumes it")
    yield {"resumed": True}


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return what runs pieces of this file and returns the exit status and all records."""
    pieces = {piece.__name__: __name__ for piece in (good, wrong, without_data, long)}
    monkeypatch.setattr(gpu_campaign, "PIECES", pieces | {"missing": "no_such_library"})
    monkeypatch.setattr(gpu_campaign, "WORK", tmp_path / "work")

    def run(*arguments: str) -> tuple[int, list[Record]]:
        path = tmp_path / "results.jsonl"
        with pytest.raises(SystemExit) as end:
            gpu_campaign.main(["--output", str(path), *arguments])
        return end.value.code, read_records(path)

    return run


def test_a_failure_affects_no_other_piece(call: Call) -> None:
    code, records = call("--tiny", "--only", "wrong", "without_data", "missing", "good")
    assert code == 1
    assert [record.status for record in records] == ["failed", "not run", "not run", "complete"]
    assert [len(record.rows) for record in records] == [1, 0, 0, 2]
    assert records[0].why == "2 is not 3"
    assert records[2].why == "needs no_such_library"
    run = records[3].run
    assert run["tiny"]
    assert run["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert {"cuda", "colossalai", "timm", "lightning", "nvidia-dali-cuda130", "python"} <= set(run["versions"])
    assert {"gpu", "gpus", "driver", "cpu", "instruction_set"} <= set(run["hardware"])
    assert call("--tiny", "--only", "without_data")[0] == 0


def test_what_is_complete_is_not_run_again(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [len(call("--tiny", "--only", "good")[1]) for _ in range(2)] == [1, 1]
    assert len(call("--tiny", "--only", "good", "--again")[1]) == 2
    describe = gpu_campaign.describe
    monkeypatch.setattr(gpu_campaign, "describe", lambda *args: describe(*args) | {"code": "other"})
    assert len(call("--tiny", "--only", "good")[1]) == 3
    assert [len(call("--tiny", "--only", "wrong")[1]) for _ in range(2)] == [4, 5]


def test_a_long_piece_is_resumed_by_the_next_call(call: Call) -> None:
    for status in ("unfinished", "complete"):
        code, records = call("--tiny", "--only", "long")
        assert (code, records[-1].status) == (0, status)


def test_without_a_gpu_nothing_is_run_and_no_result_is_lost(call: Call, capsys: pytest.CaptureFixture) -> None:
    assert call("--only", "good", "wrong") == (0, [])
    assert "good: not run: needs a GPU" in capsys.readouterr().out


def test_the_list_and_the_table(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    call("--tiny", "--only", "good", "wrong")
    capsys.readouterr()
    gpu_campaign.main(["--list", "--only", "good", "missing"])
    assert [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "Go well.",
        "(needs no_such_library)",
    ]
    gpu_campaign.main(["--table", "--only", "good", "wrong", "--output", str(tmp_path / "results.jsonl")])
    page = capsys.readouterr().out
    assert "## good\n\nGo well.\n\n| process |  share |  range |  not_run |\n" in page
    assert " 0.3333 |" in page
    assert " 1 to 2 | a reason |" in page
    assert "Failed: 2 is not 3" in page


def test_an_unknown_piece_is_refused() -> None:
    with pytest.raises(UserError, match="--only lmab: no such piece, .*; did you mean 'lamb'"):
        gpu_campaign.main(["--only", "lmab"])


def test_a_cpu_without_bfloat16_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "is_fast", lambda dtype: False)
    monkeypatch.setattr(numerics, "MODES", {"TORCH bf16": {}})
    rows = list(numerics.numerics(Job(True, tmp_path, 100)))
    assert [row["not_run"] for row in rows] == 3 * ["this CPU has no bfloat16"]


@pytest.mark.campaign
def test_every_piece(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--output", str(tmp_path / "results.jsonl")]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    first, second = (subprocess.run(command, env=environ, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    records = read_records(tmp_path / "results.jsonl")
    assert {record.piece for record in records} == set(gpu_campaign.PIECES)
    assert all(record.status == "complete" and record.rows for record in records)
    assert second.returncode == 0
    assert second.stdout.count(": complete\n") == len(records)


def spoil_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda *_: None)


def spoil_metrics(wait: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch) -> None:
    measure = MetricsHook.after_train_iter

    def waiting(hook: MetricsHook, trainer: Trainer, output: None, label: None, loss: Tensor) -> None:
        wait(loss)
        measure(hook, trainer, output, label, loss)

    monkeypatch.setattr(MetricsHook, "after_train_iter", waiting)


def spoil_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate_step = memory.estimate_step
    monkeypatch.setattr(memory, "estimate_step", lambda *args: SimpleNamespace(peak=1.2 * estimate_step(*args).peak))


def spoil_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_hook, "set_generator_states", lambda *_: None)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("piece", "spoil", "why"),
    [
        ("numerics", spoil_clipping, "sgd tf32: beyond the tolerance"),
        ("no_sync", partial(spoil_metrics, lambda loss: loss.item()), WAITS),
        (
            "no_sync",
            partial(spoil_metrics, lambda loss: torch.distributed.barrier()),
            "the host waits at gpu_campaign_test.py:",
        ),
        ("memory", spoil_prediction, "width 96 fp32: not within 10% of what was measured"),
        ("resume", spoil_checkpoint, "fp32: a resumed run differs; fp16: a resumed run differs"),
    ],
    ids=["numerics", "no_sync", "no_sync of ranks", "memory", "resume"],
)
def test_what_is_wrong_is_seen(piece, spoil, why, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    rows: list[Row] = []
    status, reason = run_piece(gpu_campaign.load_piece(piece), Job(True, tmp_path, 100), seconds=100, save=rows.append)
    assert status == "failed"
    assert why in reason
    assert any("wrong" in row for row in rows)


@pytest.mark.campaign
def test_cifar10_is_resumed_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = tuple(word for word in cifar10.TINY if not word.startswith("NUM_EPOCHS"))
    monkeypatch.setattr(cifar10, "TINY", (*epochs, "NUM_EPOCHS=10000"))
    seconds = cifar10.TO_STOP + 4.0
    reasons = []
    for _ in range(2):
        piece = partial(cifar10.cifar10, Job(True, tmp_path, seconds))
        status, why = run_piece(piece, seconds=seconds, save=print)
        assert status == "unfinished", why
        reasons.append(why)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["starts"][1]["step"] > 0
    first, second = (int(reason.split()[1].replace(",", "")) for reason in reasons)
    assert 0 < first < second
