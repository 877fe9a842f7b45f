"""Training resumes bit for bit where it stopped, in every mode; when checkpoints are saved, and which stay."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.checkpoint.content import read_trainer_state
from common.checkpoint.hook import CheckpointHook
from common.checkpoint.save import list_checkpoints, newest_checkpoint, write_checkpoint
from common.colossal import BaseHook, ParallelMode, Trainer, gpc
from common.data.crops import RandomCrop
from common.data.image_loaders import TorchvisionReader
from common.data.sampler import Draw
from common.errors import UserError, run_command
from common.launch.signals import stop_signals
from common.metrics.curves import read_metrics
from common.run.run import Run
from common.testing import tiny_task
from common.testing.checkpoints import read_result
from common.testing.parity_cases import CASES
from common.testing.ranks import launched, run_ranks

STEPS = 8  # two epochs
SETTINGS = ["TOTAL_BATCH_SIZE=16", "EVAL_EVERY=1", "CHECKPOINT_EVERY=3", "KEEP=20", "LOG.every=3"]
SETTINGS += ["MODEL.patch_size=4", "MODEL.heads=4", "MODEL.dropout=0.1"]
AMP = {
    "fp32": "None",
    "fp32 Muon": "None",
    "TORCH": "dict(mode=AMP_TYPE.TORCH, dtype='bfloat16')",
    "TORCH float16": "dict(mode=AMP_TYPE.TORCH, dtype='float16', init_scale=262144.0, growth_interval=3)",
    "NAIVE": "dict(mode=AMP_TYPE.NAIVE, dtype='bfloat16')",
    "O1": "dict(mode=AMP_TYPE.APEX, opt_level='O1', dtype='bfloat16')",
    "O2": "dict(mode=AMP_TYPE.APEX, opt_level='O2', dtype='bfloat16')",
    "O3": "dict(mode=AMP_TYPE.APEX, opt_level='O3', dtype='bfloat16')",
}


@pytest.fixture(autouse=True)
def without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than training here."""
    monkeypatch.setattr("common.metrics.curves.draw_curves", lambda *_: None)


class StopAfter(BaseHook):
    """Receive a signal during step ``step``, or in the evaluation after it."""

    def __init__(self, step: int, evaluating: bool) -> None:
        super().__init__(priority=5)
        self.step, self.evaluating = step, evaluating

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        if trainer.step == self.step and not self.evaluating:
            stop_signals.received = 15

    def after_test_iter(self, trainer: Trainer, *_: Any) -> None:
        if trainer.step == self.step:
            stop_signals.received = 15


def train(data: Path, output: Path, settings: Sequence[str] = (), stop: Any = None, *flags: str) -> list[dict]:
    """Train into ``output``, resuming the run in it; return the records so far. ``stop`` is as for `StopAfter`."""
    if stop:
        build = Run.build_hooks
        Run.build_hooks = lambda self, *arguments: [*build(self, *arguments), StopAfter(*stop)]
    with suppress(SystemExit):  # of a run that is stopped
        tiny_task.train(data, output, *SETTINGS, *settings, flags=flags)
    return read_metrics(output)


@pytest.mark.parametrize(
    ("mode", "amp", "stops"),
    [
        ("none", "fp32", [(1, False), (4, False), (4, True), (8, True)]),
        *(("none", amp, [(3, False)]) for amp in AMP if "fp32" not in amp),
        ("dp2", "fp32", [(3, False), (4, True)]),
        ("dp2", "TORCH float16", [(3, False)]),
        ("1d-2", "TORCH float16 head", [(3, False)]),
        ("1d-2", "fp32 Muon", [(3, False)]),
        *((mode, "fp32", [(3, False)]) for mode in ("2d-4", "3d-8", "dp2 x 1d-2", "zero 1 x 1d-2")),
        pytest.param("zero 3", "TORCH float16", [(4, True)], marks=pytest.mark.slow),
        pytest.param("2.5d-8", "fp32", [(3, False)], marks=pytest.mark.slow),
    ],
)
def test_resumes_bit_for_bit(mode: str, amp: str, stops: list[tuple[int, bool]], data: Path, tmp_path: Path) -> None:
    gpus, options = CASES[mode]
    settings = [f"{key}={value!r}" for key, value in options.items()] + [f"fp16={AMP[amp.removesuffix(' head')]}"]
    settings += ["EMA=0.9"] * (amp != "TORCH") + ["OPTIMIZER.name='muon'"] * amp.endswith("Muon")
    if amp.endswith(" head"):
        train(data, tmp_path / "body", ["MAX_STEPS=1"])
        settings += ["FREEZE=body", f"INIT={tmp_path / 'body'}"]
    epochs = 1 if options else 2
    settings.append(f"NUM_EPOCHS={epochs}")
    run_ranks(gpus, train, data, tmp_path / "whole", settings)
    whole, steps = read_result(tmp_path / "whole"), STEPS // 2 * epochs
    assert ("ema.safetensors" in whole) == (amp != "TORCH")
    assert list(whole["trainer.json"]["trainer"].values()) == [steps, epochs, 0, steps]
    for number, stop in enumerate(stops):
        pieces = tmp_path / f"pieces {number}"
        run_ranks(gpus, train, data, pieces, settings, stop)
        run_ranks(gpus, train, data, pieces, settings)
        found = read_result(pieces)
        assert [file for file in whole if found[file] != whole[file]] == []


def train_until_storage_fails(data: Path, output: Path) -> int:
    """Return the exit status of a command whose last rank cannot read the batch of step 8."""
    read, left = TorchvisionReader.read, iter(range(7))

    def fail(self: TorchvisionReader, draws: Iterator[Draw]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        is_last = gpc.get_global_rank() == gpc.get_world_size(ParallelMode.GLOBAL) - 1
        for batch in read(self, draws):
            if is_last and isinstance(self._pool.function.args[1], RandomCrop) and next(left, None) is None:
                raise UserError("the storage has gone")
            yield batch

    TorchvisionReader.read = fail
    with pytest.raises(SystemExit) as ended:
        run_command(lambda _: tiny_task.train(data, output, *SETTINGS), [])
    return ended.value.code


def test_resumes_where_the_storage_of_a_rank_failed(data: Path, tmp_path: Path, capfd) -> None:
    """Both ranks end, with one line, and the same command resumes from the newest periodic checkpoint."""
    run_ranks(2, train, data, tmp_path / "whole")
    capfd.readouterr()
    assert run_ranks(2, train_until_storage_fails, data, tmp_path / "run") == [2, 2]
    lines = [line for line in capfd.readouterr().err.splitlines() if "step/s" not in line]  # not the progress bar's
    assert lines == ["error: the storage has gone"]
    assert newest_checkpoint(tmp_path / "run" / "checkpoints").name == "step-00000006"
    run_ranks(2, train, data, tmp_path / "run")
    assert read_result(tmp_path / "run") == read_result(tmp_path / "whole")


def test_resumes_with_the_same_batches_in_another_mode(data: Path, tmp_path: Path) -> None:
    """One process, then two of data parallelism, `zero` and four of 2d; dropout's masks would differ between ranks."""
    settings = ["MODEL.dropout=0.0"]
    run_ranks(1, train, data, tmp_path / "whole", settings)
    run_ranks(1, train, data, tmp_path / "run", settings, (2, False))
    run_ranks(2, train, data, tmp_path / "run", settings, (4, False))
    run_ranks(2, train, data, tmp_path / "run", [*settings, "zero=dict(stage=3)"], (6, False))
    run_ranks(4, train, data, tmp_path / "run", [*settings, f"parallel={CASES['2d-4'][1]['parallel']!r}"])
    whole, pieces = (read_metrics(tmp_path / name) for name in ("whole", "run"))
    assert [(r["kind"], r["step"]) for r in pieces] == [(r["kind"], r["step"]) for r in whole]
    assert [r["loss"] for r in pieces] == pytest.approx([r["loss"] for r in whole], rel=1e-5)


def test_averages_begin_at_the_weights_of_a_checkpoint_that_has_none(data: Path, tmp_path: Path) -> None:
    run_ranks(1, train, data, tmp_path / "run", [], (3, False))
    weights = load_file(tmp_path / "run/checkpoints/step-00000003/model.safetensors")
    averaging = ["EMA=0.9", "CHECKPOINT_EVERY=1"]
    run_ranks(1, train, data, tmp_path / "run", averaging, (4, True), "--allow-change", "EMA")
    last = tmp_path / "run/checkpoints/step-00000004"
    trained, averages = load_file(last / "model.safetensors"), load_file(last / "ema.safetensors")
    for name, average in averages.items():
        torch.testing.assert_close(average, weights[name].lerp(trained[name], 1 - 5 / 14))


@pytest.mark.parametrize(("every", "steps"), [("3", [8, 6, 4, 3]), ("0.00001 min", [8, 7, 6, 5, 4, 3, 2, 1])])
def test_saves_when_due_and_marks_the_best(every: str, steps: list[int], data: Path, tmp_path: Path) -> None:
    records = train(data, tmp_path / "run", [f"CHECKPOINT_EVERY={every}"])
    top1 = {r["step"]: r["top1"] for r in records if r["kind"] == "eval"}
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == steps
    best = read_trainer_state(tmp_path / "run/checkpoints/best")
    assert best["best_top1"] == max(top1.values()) == top1[best["trainer"]["step"]]


def test_of_equal_accuracies_the_lower_loss_is_the_best() -> None:
    saved = []
    hook: Any = SimpleNamespace(best=(-1.0, 0.0))
    hook._save = lambda trainer, **_: saved.append(trainer.states["eval"])
    for top1, loss in ((0.5, 2), (0.5, 3), (0.5, 1), (0.4, 0.1), (0.6, math.nan), (0.6, 5)):
        trainer: Any = SimpleNamespace(states={"eval": {"top1": top1, "loss": loss}})
        CheckpointHook.after_test(hook, trainer)
    assert [figures["loss"] for figures in saved] == [2, 1, 5]


def write_slowly(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    def write(path: Path, content: dict) -> None:
        time.sleep(seconds)
        write_checkpoint(path, content)

    monkeypatch.setattr("common.checkpoint.hook.write_checkpoint", write)


def last_checkpoint_of_a_stopped_run(data: Path, output: Path) -> str:
    train(data, output, stop=(2, False))
    return newest_checkpoint(output / "checkpoints").name


def test_no_rank_leaves_before_the_last_checkpoint_is_written(data: Path, tmp_path: Path, monkeypatch) -> None:
    write_slowly(monkeypatch, 1)
    # the signal of step 2 is known to all after step 3
    assert run_ranks(2, last_checkpoint_of_a_stopped_run, data, tmp_path / "run") == ["step-00000003"] * 2


def agree_with_a_late_rank() -> tuple[float, list[tuple[bool, bool]]]:
    """Return how long the first call takes where the other rank is late, and what all calls return."""
    with launched():
        hook = CheckpointHook.__new__(CheckpointHook)
        hook.exchange, hook.every_steps, hook.every_seconds, hook.saved_at = None, math.inf, 3600.0, time.monotonic()
        rank, answers = torch.distributed.get_rank(), []
        if rank == 1:
            time.sleep(1)
            hook.saved_at -= 3600
        moments = [time.monotonic()]
        for step in (1, 2, 3, None):
            stop_signals.received = 15 if rank == 1 and step in (1, None) else 0
            answers.append(hook._agree(step))
            moments.append(time.monotonic())
        hook._finish_exchange()
        return moments[1] - moments[0], answers


def test_ranks_do_not_wait_for_each_other_and_agree_a_call_later() -> None:
    (first, answers), (_, others) = run_ranks(2, agree_with_a_late_rank)
    assert first < 0.5
    # a save is not due twice; in the evaluation at the end nothing is a call late
    assert answers == others == [(False, False), (True, True), (False, False), (True, True)]


def test_a_checkpoint_holds_the_state_of_its_own_step(data: Path, tmp_path: Path, monkeypatch) -> None:
    """The checkpoints of a slow disk, written while training continues, equal those of a fast one."""
    run_ranks(1, train, data, tmp_path / "fast")
    write_slowly(monkeypatch, 0.3)
    run_ranks(1, train, data, tmp_path / "slow")
    for step in (3, 6, 8):
        fast, slow = (tmp_path / name / "checkpoints" / f"step-{step:08d}" for name in ("fast", "slow"))
        for file in ("model.safetensors", "optimizer.safetensors", "random.safetensors", "trainer.json"):
            assert (fast / file).read_bytes() == (slow / file).read_bytes()
