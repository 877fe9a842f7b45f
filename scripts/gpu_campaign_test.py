"""The runner, on pieces made for it; and every real piece at its smallest, which does not run by default.

``bash scripts/test.sh -m campaign scripts/gpu_campaign_test.py`` runs the latter.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import gpu_campaign
import psutil
import pytest
import torch
from campaign import cifar10, memory, runner
from campaign.job import Job, NotRunError, Row, UnfinishedError, WrongError
from campaign.tables import format_records
from torch import Tensor

from common.checkpoint import hook as checkpoint_hook
from common.colossal import Trainer
from common.errors import UserError
from common.metrics.hook import MetricsHook

SCRIPT = Path(__file__).with_name("gpu_campaign.py")


def good(job: Job) -> Iterator[Row]:
    """Go well."""
    yield {"process": os.getpid(), "share": 1 / 3}
    yield {"range": [1.0, 2.0], "not_run": "a reason"}


def broken(job: Job) -> Iterator[Row]:
    """Break down."""
    yield {"before": 1}
    raise ZeroDivisionError("the reason")


def crashing(job: Job) -> Iterator[Row]:
    """Die."""
    yield {"before": 1}
    os.kill(os.getpid(), signal.SIGKILL)


def wrong(job: Job) -> Iterator[Row]:
    """Show that something is wrong."""
    yield {"figure": 2}
    raise WrongError("2 is not 3")


def endless(job: Job) -> Iterator[Row]:
    """Never end, nor does a process that was started."""
    child = subprocess.Popen(["sleep", "600"])
    yield {"child": child.pid}
    time.sleep(600)


def without_data(job: Job) -> Iterator[Row]:
    """Have nothing to work on."""
    raise NotRunError("no data")
    yield {}


def without_library(job: Job) -> Iterator[Row]:
    """Import what is not there."""
    import no_such_library  # noqa: F401

    yield {}


def long(job: Job) -> Iterator[Row]:
    """Take two calls."""
    mark = job.folder / "mark"
    if not mark.exists():
        mark.touch()
        raise UnfinishedError("half of it; the next call goes on")
    yield {"goes_on": True}


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, dict]]]:
    """Return what runs pieces of this file and returns the exit status and all records."""
    pieces = [good, broken, crashing, wrong, endless, without_data, without_library, long]
    module = SimpleNamespace(**{piece.__name__: piece for piece in pieces})
    monkeypatch.setitem(sys.modules, "campaign.made", module)
    monkeypatch.setattr(gpu_campaign, "PIECES", {piece.__name__: "made" for piece in pieces})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_campaign, "WORK", tmp_path / "work")

    def run(*arguments: str) -> tuple[int, dict[str, dict]]:
        with pytest.raises(SystemExit) as end:
            gpu_campaign.main(["--output", str(tmp_path / "out"), *arguments])
        files = sorted((tmp_path / "out").glob("*.json"))
        return end.value.code, {path.stem: json.loads(path.read_text()) for path in files}

    return run


def test_what_fails_costs_the_others_nothing(call) -> None:
    names = ("broken", "crashing", "wrong", "without_data", "without_library", "good")
    code, records = call("--tiny", "--only", *names)
    assert code == 1
    assert {name: record["status"] for name, record in records.items()} == {
        "broken": "failed",
        "crashing": "failed",
        "wrong": "failed",
        "without_data": "not run",
        "without_library": "not run",
        "good": "complete",
    }
    assert "ZeroDivisionError: the reason" in records["broken"]["why"]
    assert records["crashing"]["why"] == "its process ended with exit code -9"
    assert records["wrong"]["why"].endswith("2 is not 3\n")
    assert records["without_data"]["why"] == "no data"
    assert records["without_library"]["why"] == "no_such_library is not installed"
    assert [len(records[name]["rows"]) for name in names] == [1, 1, 1, 0, 0, 2]
    assert records["good"]["rows"][0]["process"] != os.getpid()


def test_what_is_not_here_is_no_failure(call) -> None:
    code, records = call("--tiny", "--only", "without_data", "without_library")
    assert code == 0
    assert all(record["status"] == "not run" for record in records.values())


def test_a_record_holds_what_makes_it_count(call) -> None:
    _, records = call("--tiny", "--only", "good")
    record = records["good"]
    assert record["shows"] == "Go well."
    assert record["tiny"]
    assert record["code"] == runner.code_checksum()
    assert record["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert {"cuda", "colossalai", "timm", "nvidia-dali-cuda130", "python"} <= set(record["versions"])
    assert {"gpu", "driver", "cpu", "instruction_set"} <= set(record["hardware"])
    assert record["seconds"] > 0


def test_what_is_done_is_not_done_again(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def process() -> int:
        code, records = call("--tiny", "--only", "good")
        assert code == 0
        return records["good"]["rows"][0]["process"]

    first = process()
    assert process() == first
    _, records = call("--tiny", "--only", "good", "--again")
    second = records["good"]["rows"][0]["process"]
    assert second != first
    monkeypatch.setattr(runner, "code_checksum", lambda: "other code")
    assert process() != second


def test_what_failed_is_done_again(call) -> None:
    for _ in range(2):
        code, records = call("--tiny", "--only", "broken")
        assert code == 1
        assert len(records["broken"]["rows"]) == 1


def test_a_piece_over_its_limit_is_killed_with_what_it_started(call) -> None:
    started = time.monotonic()
    code, records = call("--tiny", "--only", "endless", "good", "--limit", "3")
    assert time.monotonic() - started < 30
    assert code == 1
    assert records["endless"]["status"] == "failed"
    assert records["endless"]["why"] == "killed after its limit of 3 s"
    assert records["good"]["status"] == "complete"
    child = records["endless"]["rows"][0]["child"]
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_long_piece_goes_on_at_the_next_call(call) -> None:
    code, records = call("--tiny", "--only", "long")
    assert (code, records["long"]["status"]) == (0, "unfinished")
    code, records = call("--tiny", "--only", "long")
    assert (code, records["long"]["status"]) == (0, "complete")


def test_without_a_gpu_nothing_is_run_and_no_result_is_lost(call, tmp_path: Path) -> None:
    code, records = call("--only", "good", "broken")
    assert code == 0
    assert [record["why"] for record in records.values()] == ["no GPU", "no GPU"]
    record = records["good"] | {"rows": [{"figure": 1}], "status": "complete"}
    (tmp_path / "out" / "good.json").write_text(json.dumps(record))
    code, records = call("--only", "good")
    assert (code, records["good"]["rows"]) == (0, [{"figure": 1}])


def test_the_table(call) -> None:
    _, records = call("--tiny", "--only", "good", "broken")
    page = format_records([records["good"], records["broken"]])
    assert "## good\n\nGo well.\n\n| process |  share |  range |  not_run |\n" in page
    assert " 0.3333 |" in page
    assert " 1 to 2 | a reason |" in page
    assert "Failed: ZeroDivisionError: the reason" in page
    assert f"commit {records['good']['commit']}" in page


def test_an_unknown_piece_is_refused() -> None:
    with pytest.raises(UserError, match="--only lmab: no such piece, .*; did you mean 'lamb'"):
        gpu_campaign.main(["--only", "lmab"])


def test_seconds_are_those_of_all_starts() -> None:
    starts = [{"step": 0, "started": 100.0}, {"step": 20, "started": 1000.0}]
    figures = {"samples_per_s": 1.0, "mfu": 0.5, "peak_memory_gb": 2.0}
    records = [
        {"kind": "train", "step": step, "epoch": step / 20, "time": moment} | figures
        for step, moment in ((10, 110.0), (20, 130.0), (30, 1010.0), (40, 1015.0))
    ]
    records += [{"kind": "eval", "step": step, "epoch": step / 20, "time": moment, "top1": top1}
                for step, moment, top1 in ((20, 131.0, 0.7), (40, 1016.0, 0.6))]  # fmt: skip
    row = cifar10.summarise({"starts": starts, "plan": {"last_step": 40}}, records)
    assert row["seconds"] == 31 + 16
    assert (row["top1"], row["best_top1"], row["step"], row["starts"]) == (0.6, 0.7, 40, 2)


@pytest.mark.campaign
def test_every_piece(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--output", str(tmp_path)]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    first, second = (subprocess.run(command, env=environ, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(records) == set(gpu_campaign.PIECES)
    assert all(record["status"] == "complete" and record["rows"] for record in records.values())
    assert second.returncode == 0
    assert second.stdout.count(": done before") == len(records)


def spoil_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda *_: None)


def spoil_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = MetricsHook.after_train_iter

    def wait(hook: MetricsHook, trainer: Trainer, output: None, label: None, loss: Tensor) -> None:
        loss.item()
        measure(hook, trainer, output, label, loss)

    monkeypatch.setattr(MetricsHook, "after_train_iter", wait)


def spoil_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse = memory.rehearse
    monkeypatch.setattr(memory, "rehearse", lambda *args: SimpleNamespace(peak=1.2 * rehearse(*args).peak))


def spoil_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_hook, "set_generator_states", lambda *_: None)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("module", "spoil", "why"),
    [
        ("numerics", spoil_clipping, ", sgd fp32, sgd tf32, sgd TORCH bf16, sgd TORCH fp16, "),
        ("no_sync", spoil_metrics, "the host waits for the device in 9 cases"),
        ("memory", spoil_prediction, "not within 10% of what was measured: width 96 fp32; width 96 TORCH bf16"),
        ("resume", spoil_checkpoint, "a run that was gone on with is another one: fp32, fp16"),
    ],
)
def test_what_is_wrong_is_seen(module, spoil, why, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spoil(monkeypatch)
    job = Job(True, tmp_path / "work", 100)
    record = runner.run_piece(module, module, job, tmp_path / "record.json", runner.describe([]))
    assert record["status"] == "failed"
    assert why in record["why"]
    if module == "no_sync":
        assert all(row["waits"].startswith("gpu_campaign_test.py:") for row in record["rows"])


@pytest.mark.campaign
def test_cifar10_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    epochs = tuple(word for word in cifar10.TINY if not word.startswith("NUM_EPOCHS"))
    monkeypatch.setattr(cifar10, "TINY", (*epochs, "NUM_EPOCHS=10000"))
    path, about = tmp_path / "cifar10.json", runner.describe([])
    job = Job(True, tmp_path / "work", cifar10.TO_STOP + 4.0)
    reasons = []
    for _ in range(2):
        record = runner.run_piece("cifar10", "cifar10", job, path, about)
        assert record["status"] == "unfinished", record["why"]
        reasons.append(record["why"])
    assert json.loads((tmp_path / "work" / "run" / "config.json").read_text())["starts"][1]["step"] > 0
    first, second = (int(reason.split()[1].replace(",", "")) for reason in reasons)
    assert 0 < first < second
