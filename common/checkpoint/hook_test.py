"""Training resumes bit for bit where it stopped, in every mode; when checkpoints are saved, and
which stay.
"""

import itertools
import json
import math
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from common.checkpoint.content import read_trainer_state
from common.checkpoint.save import list_checkpoints, write_checkpoint
from common.checkpoint.saved_run import open_run
from common.engine.trainer import Trainer
from common.engine.upstream import BaseHook, gpc
from common.launch.signals import stop_signals
from common.metrics.metrics_file import read_metrics
from common.run.run import Run
from common.testing import tiny_task
from common.testing.checkpoints import add_fields, read_result
from common.testing.parity_cases import CASES
from common.testing.ranks import run_ranks, slow

SETTINGS = ["TOTAL_BATCH_SIZE=16", "EVAL_EVERY=1", "CHECKPOINT_EVERY=3", "KEEP=20", "LOG.every=3"]
SETTINGS += ["MODEL.patch_size=4", "MODEL.heads=4", "MODEL.dropout=0.1", "IMAGE_SIZES=[(1, 8)]"]
FLOAT16 = "dict(mode=AMP_TYPE.TORCH, dtype='float16', init_scale=262144.0, growth_interval=3)"
BFLOAT16 = "dict(mode=AMP_TYPE.TORCH, dtype='bfloat16')"
AMP = {
    "TORCH": BFLOAT16,
    "timm": BFLOAT16,
    "NAIVE": "dict(mode=AMP_TYPE.NAIVE, dtype='bfloat16')",
    "APEX": "dict(mode=AMP_TYPE.APEX, dtype='bfloat16', opt_level='O3')",
    "float16": FLOAT16,
    "head": FLOAT16,
    "fp32": "None",
    "Muon": "None",
}
IN_STEP_3 = [(3, False)]  # of `StopAfter`


@pytest.fixture(autouse=True)
def without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than training here."""
    monkeypatch.setattr("common.metrics.curves.draw_curves", lambda *_: None)


class StopAfter(BaseHook):
    """Receive a signal during step ``step``, or in the evaluation after it; or end the training
    without one (None).
    """

    def __init__(self, step: int, evaluating: bool | None) -> None:
        super().__init__(priority=5)
        self.step, self.evaluating = step, evaluating

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        if self.evaluating is None:
            trainer.stopping = trainer.step == self.step
        elif trainer.step == self.step and not self.evaluating:
            stop_signals.received = 15

    def after_test_iter(self, trainer: Trainer, *_: Any) -> None:
        if trainer.step == self.step:
            stop_signals.received = 15


def train(
    data: Path, output: Path, settings: Sequence[str] = (), stop: Any = None, *flags: str
) -> list[dict]:
    """Train into ``output``, resuming the run in it; return the records.

    The last rank, or each of 4, has `StopAfter(*stop)`.
    """
    if stop:
        build = Run.build_hooks
        Run.build_hooks = lambda self, *arguments: [
            *build(self, *arguments),
            *[StopAfter(*stop)] * (self.plan.gpus in (4, gpc.get_global_rank() + 1)),
        ]
    with suppress(SystemExit):  # of a run that is stopped
        tiny_task.train(data, output, *SETTINGS, *settings, flags=flags)
    return read_metrics(output)


@pytest.mark.parametrize(
    ("mode", "amp", "stops"),
    [
        ("none", "fp32", [(4, False), (4, True), (8, True), (2, None)]),
        *(("none", amp, IN_STEP_3) for amp in AMP if amp not in ("fp32", "head")),
        ("zero 1", "timm", IN_STEP_3),
        ("dp2", "float16", [(2, False), (4, True), (6, False)]),
        ("1d-2", "head", IN_STEP_3),
        *((mode, "fp32", IN_STEP_3) for mode in ("2d-4", "2.5d-8", "3d-8")),
        slow("dp2", "timm", IN_STEP_3),
        slow("1d-2", "Muon", IN_STEP_3),
        slow("zero 3", "float16", [(4, True)]),
        slow("zero 1 x 1d-2", "fp32", IN_STEP_3),
    ],
)
def test_resumes_bit_for_bit(mode, amp, stops, data, tmp_path):
    gpus, options = CASES[mode]
    settings = [f"{key}={value!r}" for key, value in options.items()] + [f"fp16={AMP[amp]}"]
    if amp == "timm":  # at less than 32 pixels oneDNN's gradients in bfloat16 vary
        settings += ["MODEL=dict(timm='test_resnet', image_size=64)", "IMAGE_SIZES=[(1, 32)]"]
    settings += ["EMA=0.9"] * (amp != "TORCH") + ["OPTIMIZER.name='muon'"] * (amp == "Muon")
    if amp == "head":
        train(data, tmp_path / "body", ["MAX_STEPS=1"])
        settings += ["FREEZE=body", f"INIT={tmp_path / 'body'}"]
    epochs = 1 if options else 2
    settings.append(f"NUM_EPOCHS={epochs}")
    run_ranks(gpus, train, data, tmp_path / "whole", settings)
    whole, steps = read_result(tmp_path / "whole"), 4 * epochs
    assert ("ema.safetensors" in whole) == (amp != "TORCH")
    assert list(whole["trainer.json"]["trainer"].values()) == [steps, epochs, 0, steps]
    for number, stop in enumerate(stops):
        pieces = tmp_path / f"pieces {number}"
        run_ranks(gpus, train, data, pieces, settings, stop)
        stopped = read_result(pieces)["trainer.json"]["trainer"]
        assert stopped["step"] == stop[0] + (
            gpus > 1 and not stop[1]
        )  # several ranks agree a step later
        assert stopped["evaluated_step"] < steps
        shutil.rmtree(tmp_path / "body", ignore_errors=True)  # INIT, which a rerun does not need
        add_fields(list_checkpoints(pieces / "checkpoints")[0])  # as a later version may
        run_ranks(gpus, train, data, pieces, settings)
        found = read_result(pieces)
        assert [file for file in whole if found[file] != whole[file]] == []


def test_resumes_with_the_same_batches_in_another_mode(data, tmp_path):
    """Dropout's masks would differ between ranks."""
    settings = ["MODEL.dropout=0.0", "NUM_EPOCHS=3"]
    run_ranks(1, train, data, tmp_path / "whole", settings)
    for mode, step in (("none", 1), ("dp2", 2), ("zero 3", 4), ("2.5d-4", 6), ("1d-2", None)):
        gpus, options = CASES[mode]
        own = [f"{key}={value!r}" for key, value in options.items()] + [
            "gradient_accumulation=2"
        ] * (mode == "dp2")
        run_ranks(gpus, train, data, tmp_path / "run", [*settings, *own], step and (step, False))
    starts = json.loads((tmp_path / "run" / "config.json").read_text())["starts"]
    assert [start["gpus"] for start in starts] == [1, 2, 4, 4, 2]
    assert starts[2]["changed"] == {"zero.stage": [None, 3], "processes": [2, 4]}
    whole, pieces = (read_metrics(tmp_path / name) for name in ("whole", "run"))
    assert [(r["kind"], r["step"]) for r in pieces] == [(r["kind"], r["step"]) for r in whole]
    assert [r["loss"] for r in pieces] == pytest.approx([r["loss"] for r in whole], rel=1e-5)


def test_averages_begin_at_the_weights_of_a_checkpoint_that_has_none(data, tmp_path):
    run_ranks(1, train, data, tmp_path / "run", (), (3, False))
    weights = load_file(tmp_path / "run/checkpoints/step-00000003/model.safetensors")
    averaging = ["EMA=0.9", "EMA_WARMUP=False", "CHECKPOINT_EVERY=1", "gradient_accumulation=2"]
    allowed = "--allow-change=EMA", "--allow-change=EMA_WARMUP"
    run_ranks(1, train, data, tmp_path / "run", averaging, (4, True), *allowed)  # once a step
    last = tmp_path / "run/checkpoints/step-00000004"
    trained, averages = load_file(last / "model.safetensors"), load_file(last / "ema.safetensors")
    for name, average in averages.items():
        torch.testing.assert_close(average, weights[name].lerp(trained[name], 0.1))


@pytest.mark.parametrize(
    ("gpus", "every", "keep", "steps"),
    [
        (1, "3", 2, [8, 6]),
        (1, "0.5 min", 20, [8, 7, 4, 3]),
        (2, "0.5 min", 20, [8, 4]),
    ],  # ranks agree a step later
)
def test_saves_when_due_and_marks_the_best(gpus, every, keep, steps, data, tmp_path, monkeypatch):
    seconds = itertools.count(
        0, 10
    )  # the hook looks at its clock in each step, evaluation batch and checkpoint
    monkeypatch.setattr(
        "common.checkpoint.hook.time", SimpleNamespace(monotonic=lambda: next(seconds))
    )
    settings = [f"CHECKPOINT_EVERY={every}", f"KEEP={keep}", "LEARNING_RATE=1e-5"]
    evaluations = [
        r
        for r in run_ranks(gpus, train, data, tmp_path / "run", settings)[0]
        if r["kind"] == "eval"
    ]
    best = max(evaluations, key=lambda r: (r["top1"], -r["loss"]))
    assert (
        gpus > 1 or [r["top1"] for r in evaluations].count(best["top1"]) > 1
    )  # equals are there: the lower loss decides
    assert [
        int(path.name[5:]) for path in list_checkpoints(tmp_path / "run" / "checkpoints")
    ] == steps
    marked = read_trainer_state(tmp_path / "run/checkpoints/best")
    assert (marked["best_top1"], marked["trainer"]["step"]) == (best["top1"], best["step"])


# What four evaluations give.
FIGURES = {
    "loss": (2.0, 3.0, 2.5, 1.0),
    "top1": (0.5, 0.6, 0.6, 0.4),
    "mean_recall": (0.3, math.nan, 0.2, 0.3),
    "macro_f1": (0.7, 0.7, 0.1, math.nan),
}


class Evaluated(BaseHook):
    """Give the evaluations after the first steps `FIGURES`, and less to those that follow."""

    def __init__(self) -> None:
        super().__init__(priority=-1)

    def after_test(self, trainer: Trainer) -> None:
        number = trainer.step // 4 - 1
        figures = {name: values[number] for name, values in FIGURES.items() if number < 4}
        trainer.states["figures"] = figures or dict.fromkeys(FIGURES, 0.05)


# Of equal ones, the lower loss; NaN never.
@pytest.mark.parametrize(
    ("metric", "step"), [("top1", 12), ("loss", 16), ("mean_recall", 16), ("macro_f1", 4)]
)
def test_the_best_is_by_the_metric_of_the_config(metric, step, data, tmp_path, monkeypatch, capsys):
    build = Run.build_hooks
    monkeypatch.setattr(Run, "build_hooks", lambda *given: [*build(*given), Evaluated()])
    settings = [f"BEST={metric}", "NUM_EPOCHS=4"]
    train(data, tmp_path / "run", settings)
    link = tmp_path / "run/checkpoints/best"
    assert link.resolve().name == f"step-{step:08d}"
    if step < 16:
        figure = FIGURES[metric][step // 4 - 1]
        assert f"best         {metric} {figure:.4f} at step {step} (" in capsys.readouterr().out
    if metric == "macro_f1":
        for other, best in ((metric, 4), ("mean_recall", 24)):
            settings = [f"BEST={other}", f"NUM_EPOCHS={5 + (best > 4)}", "KEEP=1"]
            train(data, tmp_path / "run", settings)
            assert link.resolve().name == f"step-{best:08d}"
        assert "BEST='mean_recall' from here on (was 'macro_f1'); the best starts anew" in (
            capsys.readouterr().out
        )


@pytest.mark.parametrize("gpus", [1, 2])
def test_patience_ends_a_run_as_finished(gpus, data, tmp_path, capfd):
    run = tmp_path / "run"
    settings = ["LEARNING_RATE=1e-50", "NUM_EPOCHS=5"]  # whose evaluations are equal
    run_ranks(gpus, train, data, run, [*settings, "PATIENCE=2"], (9, False))
    assert "ended" not in capfd.readouterr().out
    for patience, end in ((2, 12), (2, 12), (3, 16), (9, 20)):
        run_ranks(gpus, train, data, run, [*settings, f"PATIENCE={patience}"])
        said = " ".join(capfd.readouterr().out.split())
        is_early = end < 20
        why = f"ended at step {end} of 20: {patience} evaluations without a better top1 (PATIENCE)"
        finished = f"finished, at step {end} with"
        assert (why in said or finished in said) == is_early
        if finished in said:
            assert "Extend it with --set PATIENCE=N (now 2)" in said
        assert read_result(run)["trainer.json"]["trainer"]["evaluated_step"] == end
        about = json.loads((run / "config.json").read_text())
        assert about["plan"]["last_step"] == read_metrics(run)[-1]["step"] == end
        assert read_trainer_state(run / "checkpoints/best")["trainer"]["step"] == 4


def test_an_evaluation_that_equals_one_that_was_not_saved_is_the_best(data, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "common.checkpoint.hook.mark_best", mark := Mock(side_effect=[OSError, None])
    )
    train(data, tmp_path / "run", ["LEARNING_RATE=1e-50"])
    assert mark.call_count == 2


def test_on_other_data_the_best_starts_anew_in_a_copy_without_links_too(data, tmp_path):
    settings = ["LEARNING_RATE=1e-50", "NUM_EPOCHS=1"]  # whose evaluations are equal
    run_ranks(1, train, data, tmp_path / "run", settings)
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert open_run(str(copy)).checkpoint.name == "step-00000004"
    other = shutil.copytree(data, tmp_path / "data")
    (other / "train/red/04.png").unlink()
    settings[1] = "NUM_EPOCHS=2"
    run_ranks(1, train, other, copy, settings, None, "--allow-change=DATA.root")
    assert open_run(str(copy)).checkpoint.name == "step-00000008"
    assert (copy / "checkpoints/best").is_symlink()


def test_a_checkpoint_holds_the_state_of_its_own_step(data, tmp_path, monkeypatch):
    """The checkpoints of a slow disk, written while training continues, equal those of a fast
    one.
    """

    def write_slowly(path: Path, content: dict) -> None:
        time.sleep(0.3)
        write_checkpoint(path, content)

    def newest(output: Path) -> str:  # when a rank ends, launchers end the others
        train(data, output)
        return list_checkpoints(output / "checkpoints")[0].name

    run_ranks(2, newest, tmp_path / "fast")
    monkeypatch.setattr("common.checkpoint.hook.write_checkpoint", write_slowly)
    assert run_ranks(2, newest, tmp_path / "slow") == ["step-00000008"] * 2
    for step in (3, 6, 8):
        fast, slow = (
            tmp_path / name / "checkpoints" / f"step-{step:08d}" for name in ("fast", "slow")
        )
        for file in (
            "model.safetensors",
            "optimizer.safetensors",
            "random.safetensors",
            "trainer.json",
        ):
            assert (fast / file).read_bytes() == (slow / file).read_bytes()


def test_a_run_that_diverges_names_its_last_checkpoint(data, tmp_path):
    settings = ["LEARNING_RATE=1e30", "MAX_SKIPPED=2", "CHECKPOINT_EVERY=1"]
    with pytest.raises(RuntimeError, match="the last checkpoint is .*/step-0000000"):
        run_ranks(1, train, data, tmp_path / "run", settings)
