"""Training resumes bit for bit where it stopped, in every mode; when checkpoints are saved, and
which stay.
"""

import itertools
import json
import shutil
import time
from collections import Counter
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
from common.errors import UserError
from common.launch.signals import stop_signals
from common.metrics.metrics_file import read_metrics
from common.process import Stopped
from common.run.run import Run
from common.testing import tiny_task
from common.testing.checkpoints import add_fields, read_result
from common.testing.commands import run_forked
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
# A sum over two ranks is the same in any order.
DP4 = {"dp4": (4, {})}


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
        self.step = step
        self.evaluating = evaluating

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

        def build_with_stop(run: Run, *arguments: Any) -> list[Any]:
            hooks = build(run, *arguments)
            if run.plan.world_size in (4, gpc.get_global_rank() + 1):
                hooks.append(StopAfter(*stop))
            return hooks

        Run.build_hooks = build_with_stop
    with suppress(Stopped):
        tiny_task.train(data, output, *SETTINGS, *settings, flags=flags)
    return read_metrics(output)


@pytest.mark.parametrize(
    ("mode", "amp", "stops"),
    [
        ("none", "fp32", [(4, False), (4, True), (8, True), (2, None)]),
        *(("none", amp, IN_STEP_3) for amp in AMP if amp not in ("fp32", "head")),
        ("zero 1", "timm", IN_STEP_3),
        ("dp2", "float16", [(2, False), (4, True), (6, False)]),
        ("dp4", "fp32", [(2, False)]),
        ("1d-2", "head", IN_STEP_3),
        *((mode, "fp32", IN_STEP_3) for mode in ("2d-4", "2.5d-8", "3d-8")),
        slow("dp2", "timm", IN_STEP_3),
        slow("1d-2", "Muon", IN_STEP_3),
        slow("zero 3", "float16", [(4, True)]),
        slow("zero 1 x 1d-2", "fp32", IN_STEP_3),
    ],
)
def test_resumes_bit_for_bit(mode, amp, stops, data, tmp_path):
    world_size, options = (CASES | DP4)[mode]
    settings = [f"{key}={value!r}" for key, value in options.items()] + [f"fp16={AMP[amp]}"]
    if amp == "timm":
        settings += ["MODEL=dict(timm='test_resnet', image_size=32)", "IMAGE_SIZES=[(1, 16)]"]
    if amp != "TORCH":
        settings.append("EMA=0.9")
    if amp == "Muon":
        settings.append("OPTIMIZER.name='muon'")
    if amp == "head":
        train(data, tmp_path / "body", ["MAX_STEPS=1"])
        settings += ["FREEZE=body", f"INIT={tmp_path / 'body'}"]
    epochs = 1 if options else 2
    settings.append(f"NUM_EPOCHS={epochs}")
    run_ranks(world_size, train, data, tmp_path / "whole", settings)
    whole = read_result(tmp_path / "whole")
    steps = 4 * epochs
    assert ("raw.safetensors" in whole) == (amp != "TORCH")
    assert list(whole["trainer.json"]["trainer"].values()) == [steps, epochs, 0, steps]
    for number, stop in enumerate(stops):
        pieces = tmp_path / f"pieces {number}"
        run_ranks(world_size, train, data, pieces, settings, stop)
        stopped = read_result(pieces)["trainer.json"]["trainer"]
        assert stopped["step"] == stop[0] + (
            world_size > 1 and not stop[1]
        )  # several ranks agree a step later
        assert stopped["evaluated_step"] < steps
        shutil.rmtree(tmp_path / "body", ignore_errors=True)  # INIT, which a rerun does not need
        add_fields(list_checkpoints(pieces / "checkpoints")[0])  # as a later version may
        run_ranks(world_size, train, data, pieces, settings)
        found = read_result(pieces)
        assert [file for file in whole if found[file] != whole[file]] == []


# Of 8 images, then of 16; 8 steps in the first epoch.
SWITCHING = ["DATA.repeats=2", "MIXUP=0.2", "LR_SCHEDULE=wsd", "DECAY=0.5", "NUM_EPOCHS=2"]
SWITCHING += ["BATCH_SIZES=[(1, 8)]"]
# It asks for more than 16 images after the first epoch, of 8 steps.
BY_NOISE = ["BATCH_SIZES=noise", "SMALLEST_BATCH=8", "NOISE_FACTOR=100", "MICRO_BATCH_SIZE=2"]
BY_NOISE += ["LEARNING_RATE=1e-2", "NUM_EPOCHS=3"]
ZERO = "zero=dict(stage=3)"


@pytest.mark.parametrize(
    ("world_size", "settings", "stops", "sizes"),
    [
        (1, SWITCHING, [7, 8, 9], {8: 8, 16: 4}),
        (2, SWITCHING, [6, 7], {8: 8, 16: 4}),
        slow(4, [*SWITCHING, ZERO], [6, 7], {8: 8, 16: 4}),
        (1, BY_NOISE, [7, 8, 9], {8: 8, 16: 8}),
        slow(2, BY_NOISE, [6, 7], {8: 8, 16: 8}),
        slow(4, [*BY_NOISE, ZERO], [6, 7], {8: 8, 16: 8}),
    ],
)
def test_resumes_bit_for_bit_across_batches(
    world_size, settings, stops, sizes, data, tmp_path, capfd
):
    settings = [*settings, "LOG.every=1"]
    run_ranks(world_size, train, data, tmp_path / "whole", settings)
    whole = read_result(tmp_path / "whole")
    assert "\nended " not in capfd.readouterr().out  # as by PATIENCE
    records = [each for each in whole["metrics.jsonl"] if each["kind"] == "train"]
    assert Counter(each["batch_size"] for each in records) == sizes
    assert whole["trainer.json"]["trainer"]["step"] == sum(sizes.values())
    for stop in stops:
        pieces = tmp_path / f"pieces {stop}"
        run_ranks(world_size, train, data, pieces, settings, (stop, False))
        stopped = read_result(pieces)["trainer.json"]["trainer"]
        assert stopped["step"] == stop + (world_size > 1)  # several ranks agree a step later
        run_ranks(world_size, train, data, pieces, settings)
        found = read_result(pieces)
        assert [file for file in whole if found[file] != whole[file]] == []
    said = _rerun(data, pieces, settings)
    assert f": this run is finished, at step {sum(sizes.values())} " in said
    if world_size == 1:  # from the checkpoint of step 9
        said = _rerun(data, pieces, settings, "--replay=12")
        assert "metrics.jsonl: equal to the bit at 3 records, 10 to 12" in said


def test_a_batch_is_chosen_at_the_end_of_an_epoch_at_which_max_steps_stops(data, tmp_path):
    settings = [*BY_NOISE, "LOG.every=1"]
    run_ranks(1, train, data, tmp_path / "whole", settings)
    run_ranks(1, train, data, tmp_path / "pieces", [*settings, "MAX_STEPS=8"])
    run_ranks(1, train, data, tmp_path / "pieces", settings)
    assert read_result(tmp_path / "pieces") == read_result(tmp_path / "whole")


def _rerun(data: Path, output: Path, settings: Sequence[str], *flags: str) -> str:
    """Return what a start prints that leaves the run as it is."""
    ended = run_forked(lambda argv: train(data, output, settings, None, *flags), code=0)
    return " ".join(ended.stdout.split())


# Of 16 steps, 4 are warm-up and 8 decay.
STABLE = ["LR_SCHEDULE=wsd", "WARMUP_EPOCHS=1", "DECAY=0.5", "EMA=0.9"]


def result_of(output: Path) -> dict[str, Any]:
    """Return `read_result` without the best so far, which a branch begins anew."""
    result = read_result(output)
    for name in ("best_top1", "best_loss", "stale"):
        del result["trainer.json"][name]
    return result


@pytest.mark.parametrize("stop", [4, 8])
def test_resumes_bit_for_bit_where_the_stable_phase_begins_and_ends(stop, data, tmp_path):
    settings = [*STABLE, "NUM_EPOCHS=4"]
    run_ranks(1, train, data, tmp_path / "whole", settings)
    run_ranks(1, train, data, tmp_path / "pieces", settings, (stop, False))
    stopped = read_result(tmp_path / "pieces")["trainer.json"]["trainer"]["step"]
    assert stopped == stop
    run_ranks(1, train, data, tmp_path / "pieces", settings)
    assert read_result(tmp_path / "pieces") == read_result(tmp_path / "whole")


@pytest.mark.parametrize(
    ("mode", "schedule"),
    [("none", "wsd"), slow("zero 1", "wsd_sqrt"), ("1d-2", "wsd"), slow("2d-4", "wsd_sqrt")],
)
def test_a_branch_equals_a_run_of_its_length_bit_for_bit(mode, schedule, data, tmp_path, capfd):
    """From the middle of the stable phase, of a run whose own decay would have begun later."""
    world_size, options = CASES[mode]
    settings = [*STABLE, *(f"{key}={value!r}" for key, value in options.items())]
    settings.append(f"LR_SCHEDULE={schedule}")
    run_ranks(world_size, train, data, tmp_path / "whole", [*settings, "NUM_EPOCHS=4"])
    run_ranks(world_size, train, data, tmp_path / "long", [*settings, "NUM_EPOCHS=100"], (6, False))
    run_ranks(
        world_size,
        train,
        data,
        tmp_path / "branch",
        [*settings, "NUM_EPOCHS=4"],
        None,
        f"--resume={tmp_path / 'long'}",
    )
    assert result_of(tmp_path / "branch") == result_of(tmp_path / "whole")
    step = 6 + (world_size > 1)  # several ranks agree a step later
    said = " ".join(capfd.readouterr().out.split())
    assert f"learning rate at step {step}: 0.002, as by the earlier schedule" in said
    assert said.count(f"step-{step:08}: {tmp_path / 'branch'} is a branch ") == 1


def test_a_branch_across_batches_equals_a_run_of_its_length_bit_for_bit(data, tmp_path, capfd):
    """8 steps of 8 images, then 4 an epoch of 16: step 10 is in the second epoch of four."""
    settings = [*STABLE, "BATCH_SIZES=[(1, 8)]", "CHECKPOINT_EVERY=99", "KEEP=1"]
    run_ranks(1, train, data, tmp_path / "whole", [*settings, "NUM_EPOCHS=4"])
    # that at the end of the stable phase is kept
    assert (tmp_path / "whole" / "checkpoints" / "step-00000012").exists()
    run_ranks(1, train, data, tmp_path / "long", [*settings, "NUM_EPOCHS=100"], (10, False))
    flag = f"--resume={tmp_path / 'long'}"
    run_ranks(1, train, data, tmp_path / "branch", [*settings, "NUM_EPOCHS=4"], None, flag)
    assert result_of(tmp_path / "branch") == result_of(tmp_path / "whole")
    said = " ".join(capfd.readouterr().out.split())
    assert "learning rate at step 10: 0.002, as by the earlier schedule" in said
    rates = [record["lr"] for record in read_metrics(tmp_path / "whole") if "lr" in record]
    # records of three steps: warm-up in small batches, then stable to the middle, then down
    small = 0.002 * 0.5**0.5
    decaying = [0.002 * share / 16 for share in (12, 6, 2)]
    assert rates == pytest.approx([small * 3 / 9, small * 6 / 9, 0.002, 0.002, *decaying])


def test_a_stable_phase_may_end_earlier_than_was_said(data, tmp_path):
    """In the run's own folder, as nothing that it has trained with depends on its end."""
    train(data, tmp_path / "whole", [*STABLE, "NUM_EPOCHS=4"])
    run = tmp_path / "run"
    run_ranks(1, train, data, run, [*STABLE, "NUM_EPOCHS=100"], (6, False))
    with pytest.raises(UserError, match="NUM_EPOCHS=2 .was 100.: the run in .* has trained with"):
        train(data, run, [*STABLE, "NUM_EPOCHS=2"])
    train(data, run, [*STABLE, "NUM_EPOCHS=4"])
    assert result_of(run) == result_of(tmp_path / "whole")


UNCHANGED = "LEARNING_RATE=1e-50"  # whose evaluations are equal


def test_a_branch_from_the_decay_names_the_checkpoints_before_it(data, tmp_path, capsys):
    run = tmp_path / "run"
    train(data, run, [*STABLE, UNCHANGED, "NUM_EPOCHS=4", "KEEP=1"])
    saved = [path.name for path in list_checkpoints(run / "checkpoints")]
    # the last one, that of the stable phase's end, and the best
    assert saved == ["step-00000016", "step-00000008", "step-00000004"]
    chosen = open_run(str(run)).chosen
    assert chosen == "the best; the last is step-00000016; moving average of the weights"
    longer = tmp_path / "longer", [*STABLE, UNCHANGED, "NUM_EPOCHS=8"], None, f"--resume={run}"
    said = (
        "step 16 is in the decay, which begins at step 8 in that run and 16 with NUM_EPOCHS=8; "
        "branch off from step-00000008, step-00000004, or add --allow-change NUM_EPOCHS$"
    )
    with pytest.raises(UserError, match=said):
        train(data, *longer)
    assert not longer[0].exists()
    train(data, *longer, "--allow-change=NUM_EPOCHS")
    shown = " ".join(capsys.readouterr().out.split())
    assert "learning rate at step 16: 1e-50, 0 by the earlier schedule" in shown


def test_a_branch_that_is_too_short_names_the_checkpoints_before_its_decay(data, tmp_path):
    run = tmp_path / "run"
    train(data, run, [*STABLE, UNCHANGED, "NUM_EPOCHS=4"])
    shorter = [*STABLE, UNCHANGED, "NUM_EPOCHS=3"]  # decays from step 6 on
    said = "step 8 is in .* 8 in that run and 6 with .* from step-00000006, step-00000004, step-0"
    with pytest.raises(UserError, match=said):
        train(data, tmp_path / "branch", shorter, None, f"--resume={run}/checkpoints/step-00000008")


def test_a_branch_within_the_same_decay_trains(data, tmp_path, capsys):
    settings = [*STABLE, UNCHANGED, "NUM_EPOCHS=4"]
    train(data, tmp_path / "run", settings)
    capsys.readouterr()
    resume = f"--resume={tmp_path / 'run/checkpoints/step-00000012'}"
    train(data, tmp_path / "branch", [*settings, "LABEL_SMOOTHING=0.1"], None, resume)
    assert "by the earlier schedule" not in capsys.readouterr().out
    assert read_metrics(tmp_path / "branch")[-1]["step"] == 16


@pytest.mark.parametrize(
    ("schedule", "rate", "batches", "step"),
    [
        *((name, 0.002, [], 4) for name in ("wsd", "wsd_sqrt")),
        *((name, 0.001, [], 4) for name in ("cosine", "linear", "timm")),
        ("cosine", 0.001, [(1, 32)], 2),
    ],
)
def test_a_finished_run_that_goes_on_says_what_its_rate_does(
    schedule, rate, batches, step, data, tmp_path, capsys
):
    """A schedule of twice the length is half over."""
    settings = [f"LR_SCHEDULE={schedule}", "EVAL_EVERY=9", f"BATCH_SIZES={batches}"]
    train(data, tmp_path / "run", [*settings, "NUM_EPOCHS=1"])
    capsys.readouterr()
    train(data, tmp_path / "run", [*settings, "NUM_EPOCHS=2", "LOG.every=1"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"learning rate at step {step}: {rate}, 0 by the earlier schedule" in said
    records = [record for record in read_metrics(tmp_path / "run") if record["kind"] == "train"]
    (first,) = [record["lr"] for record in records if record["step"] == step + 1]
    assert first == pytest.approx(rate)


@pytest.mark.parametrize(
    ("batches", "stops"),
    [
        ([], (1, 2, 4, 6, None)),
        # 8 steps of 8 images, 17 of 4, 4 of 16: the second and the fourth stop at a switch
        slow([(1, 8), (1, 4)], (1, 7, 9, 24, None)),
    ],
)
def test_resumes_with_the_same_batches_in_another_mode(batches, stops, data, tmp_path):
    """Dropout's masks would differ between ranks."""
    settings = ["MODEL.dropout=0.0", "NUM_EPOCHS=3", f"BATCH_SIZES={batches}"]
    run_ranks(1, train, data, tmp_path / "whole", settings)
    for mode, step in zip(("none", "dp2", "zero 3", "2.5d-4", "1d-2"), stops, strict=True):
        world_size, options = CASES[mode]
        own = [*settings, *(f"{key}={value!r}" for key, value in options.items())]
        if mode == "dp2":
            own.append("gradient_accumulation=2")
        run_ranks(world_size, train, data, tmp_path / "run", own, step and (step, False))
    starts = json.loads((tmp_path / "run" / "config.json").read_text())["starts"]
    assert [start["gpus"] for start in starts] == [1, 2, 4, 4, 2]
    assert starts[2]["changed"] == {"zero.stage": [None, 3], "processes": [2, 4]}
    whole, pieces = (read_metrics(tmp_path / name) for name in ("whole", "run"))
    for piece, record in zip(pieces, whole, strict=True):
        assert (piece["kind"], piece["step"]) == (record["kind"], record["step"])
        assert piece["loss"] == pytest.approx(record["loss"], rel=1e-5)


def test_averages_begin_at_the_weights_of_a_checkpoint_that_has_none(data, tmp_path):
    first, last = (tmp_path / f"run/checkpoints/step-0000000{step}" for step in (3, 4))
    run_ranks(1, train, data, tmp_path / "run", (), (3, False))
    averaging = ["EMA=0.9", "EMA_WARMUP=False", "CHECKPOINT_EVERY=1", "gradient_accumulation=2"]
    allowed = "--allow-change=EMA", "--allow-change=EMA_WARMUP"
    run_ranks(1, train, data, tmp_path / "run", averaging, (4, True), *allowed)
    files = first / "model.safetensors", last / "raw.safetensors", last / "model.safetensors"
    weights, trained, averages = map(load_file, files)
    for name, average in averages.items():  # once a step, not a micro-batch
        torch.testing.assert_close(average, weights[name].lerp(trained[name], 0.1))


def test_a_checkpoint_of_version_1_resumes_bit_for_bit(data, tmp_path):
    """It has the averages in a file of their own, and what is trained in model.safetensors."""
    settings = ["EMA=0.9", "NUM_EPOCHS=1"]
    run_ranks(1, train, data, tmp_path / "whole", settings)
    run_ranks(1, train, data, tmp_path / "run", settings, (3, False))
    (path,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    content = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "COMPLETE"}
    averages = content.pop("model.safetensors")
    trained = content.pop("raw.safetensors")
    assert averages != trained
    state = content["trainer.json"].replace(b'"version": 2', b'"version": 1')
    metadata = json.loads(content["config.json"])
    for resolution in metadata["plan"]["resolutions"]:  # batches did not change
        del resolution["total_batch"], resolution["steps"]
    content["config.json"] = json.dumps(metadata).encode()
    content |= {"ema.safetensors": averages, "model.safetensors": trained, "trainer.json": state}
    write_checkpoint(path, content)
    files = [open_run(str(path), raw=raw).weights for raw in (False, True)]
    assert files == ["ema.safetensors", "model.safetensors"]
    run_ranks(1, train, data, tmp_path / "run", settings)
    assert read_result(tmp_path / "run") == read_result(tmp_path / "whole")


@pytest.mark.parametrize(
    ("world_size", "every", "keep", "steps"),
    [
        (1, "3", 2, [8, 6]),
        (1, "0.5 min", 20, [8, 7, 4, 3]),
        (2, "0.5 min", 20, [8, 4]),  # ranks agree a step later
    ],
)
def test_saves_when_due(world_size, every, keep, steps, data, tmp_path, monkeypatch):
    # the hook looks at its clock in each step, evaluation batch and checkpoint
    clock = SimpleNamespace(monotonic=itertools.count(0, 10).__next__)
    monkeypatch.setattr("common.checkpoint.hook.time", clock)
    settings = [f"CHECKPOINT_EVERY={every}", f"KEEP={keep}", "LEARNING_RATE=1e-5"]
    run_ranks(world_size, train, data, tmp_path / "run", settings)
    saved = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [int(path.name[5:]) for path in saved] == steps


def test_the_best_is_by_the_metric_of_the_config(data, tmp_path, capsys):
    run = tmp_path / "run"
    settings = ["BEST=loss", "LEARNING_RATE=1.0", "NUM_EPOCHS=4", "KEEP=1"]
    evaluations = [r for r in train(data, run, settings) if r["kind"] == "eval"]
    best = min(evaluations, key=lambda r: r["loss"])
    assert best != max(evaluations, key=lambda r: r["top1"])
    link = run / "checkpoints/best"
    marked = read_trainer_state(link)
    known = marked["trainer"]["step"], marked["best_loss"], marked["stale"]
    assert known == (best["step"], best["loss"], 0)
    train(data, run, [*settings, "BEST=mean_recall", "NUM_EPOCHS=5"])
    assert link.resolve().name == "step-00000020"
    said = "BEST='mean_recall' from here on (was 'loss'); the best starts anew"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluations_that_cannot_be_the_best_are_said_once(world_size, data, tmp_path, capfd):
    folders = tmp_path / "data"
    for path in ("train/red", "train/blue", "test/red"):
        shutil.copytree(data / path, folders / path)
    (folders / "test/blue").mkdir()  # of whose class validation has no image
    settings = ["BEST=auroc", "NUM_EPOCHS=3", "TOTAL_BATCH_SIZE=4"]
    run_ranks(world_size, train, folders, tmp_path / "run", settings)
    said = capfd.readouterr().err
    line = "warning: no checkpoint counts as the best at step 5: BEST='auroc' is nan, the loss 0."
    assert said.count("warning: ") == said.count(line) == 1
    assert "; AUROC needs images of both classes" in said
    assert not (tmp_path / "run/checkpoints/best.txt").exists()


PATIENT = ["LEARNING_RATE=1e-50", "NUM_EPOCHS=5"]  # whose evaluations are equal


def evaluated_last(run: Path) -> int:
    """Return the step of a finished run's last evaluation, which its record says too."""
    metadata = json.loads((run / "config.json").read_text())
    assert metadata["plan"]["last_step"] == read_metrics(run)[-1]["step"]
    assert read_trainer_state(run / "checkpoints/best")["trainer"]["step"] == 4
    return metadata["plan"]["last_step"]


def test_patience_counts_on_after_a_resume(data, tmp_path, capfd):
    run = tmp_path / "run"
    run_ranks(2, train, data, run, [*PATIENT, "PATIENCE=2"], (9, False))
    assert "ended" not in capfd.readouterr().out
    run_ranks(2, train, data, run, [*PATIENT, "PATIENCE=2"])
    said = " ".join(capfd.readouterr().out.split())
    assert "ended at step 12 of 20: 2 evaluations without a better top1 (PATIENCE)" in said
    assert evaluated_last(run) == 12


def test_a_run_that_patience_has_ended_is_finished_until_there_is_more(data, tmp_path, capfd):
    run = tmp_path / "run"
    train(data, run, [*PATIENT, "PATIENCE=2"])
    assert evaluated_last(run) == 12
    train(data, run, [*PATIENT, "PATIENCE=2"])
    said = " ".join(capfd.readouterr().out.split())
    assert "Extend it with --set PATIENCE=N (now 2)" in said
    train(data, run, [*PATIENT, "PATIENCE=9"])
    assert evaluated_last(run) == 20


def test_an_evaluation_that_equals_one_that_was_not_saved_is_the_best(data, tmp_path, monkeypatch):
    mark = Mock(side_effect=[OSError, None])
    monkeypatch.setattr("common.checkpoint.hook.mark_best", mark)
    train(data, tmp_path / "run", ["LEARNING_RATE=1e-50"])
    assert mark.call_count == 2


def test_on_other_data_the_best_starts_anew(data, tmp_path):
    settings = ["LEARNING_RATE=1e-50", "NUM_EPOCHS=1"]  # whose evaluations are equal
    run = tmp_path / "run"
    train(data, run, settings)
    other = shutil.copytree(data, tmp_path / "data")
    (other / "train/red/04.png").unlink()
    train(other, run, [*settings, "NUM_EPOCHS=2"], None, "--allow-change=DATA.root")
    assert open_run(str(run)).checkpoint.name == "step-00000008"


def test_by_another_metric_the_best_starts_anew(data, tmp_path):
    """A top-1 above 0 is above any loss, whose sign is turned."""
    settings = ["LEARNING_RATE=1e-50", "NUM_EPOCHS=1"]  # whose evaluations are equal
    run = tmp_path / "run"
    train(data, run, settings)
    train(data, run, [*settings, "NUM_EPOCHS=2", "BEST=loss"])
    assert open_run(str(run)).checkpoint.name == "step-00000008"


def test_a_branch_marks_its_own_best(data, tmp_path):
    settings = ["LEARNING_RATE=1e-50", "NUM_EPOCHS=1"]  # whose evaluations are equal
    train(data, tmp_path / "run", settings)
    last = list_checkpoints(tmp_path / "run" / "checkpoints")[0]
    train(data, tmp_path / "branch", [*settings, "NUM_EPOCHS=2"], None, f"--resume={last}")
    assert open_run(str(tmp_path / "branch")).chosen == "the best"


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
    assert run_ranks(2, newest, tmp_path / "slow") == ["step-00000008", "step-00000008"]
    files = [*(tmp_path / "slow").glob("checkpoints/step-*/*.safetensors")]
    assert len(files) >= 9
    for file in files:
        fast = tmp_path / "fast" / file.relative_to(tmp_path / "slow")
        assert fast.read_bytes() == file.read_bytes()


def test_a_run_that_diverges_names_its_last_checkpoint(data, tmp_path):
    settings = ["LEARNING_RATE=1e30", "MAX_SKIPPED=2", "CHECKPOINT_EVERY=1"]
    with pytest.raises(RuntimeError, match="the last checkpoint is .*/step-0000000"):
        run_ranks(1, train, data, tmp_path / "run", settings)
