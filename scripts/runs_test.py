"""Rerunning a training command: output, exit status, the run's folder."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.metrics.metrics_file import read_metrics
from common.testing.commands import Ended, in_words, read_folder, run_forked
from common.tools import evaluate, report
from imagenet_dali import train_dali
from imagenet_dali.testing import prepare_data, write_config

SETTINGS = ["NUM_EPOCHS=2", "LOG.tensorboard=False", "DATA.loader=torchvision", "DATA.workers=1"]
Train = Callable[..., Ended]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


def train_without_dali(argv: list[str]) -> None:
    sys.modules["imagenet_dali.imagenet_dali_dataloader"] = None  # an import of it fails
    train_dali.main(argv)


@pytest.fixture(scope="module")
def train(folder: Path) -> Train:
    """Return what reruns the command of a run of two epochs, with more words."""
    settings = in_words(*SETTINGS, f"DATA.root={prepare_data(folder)}")
    command = ["--config", write_config(folder), "--output", folder / "run", *settings]
    return lambda *words, code=0: run_forked(train_without_dali, [*command, *words], code)


@pytest.fixture(scope="module")
def first(train: Train) -> Ended:
    """What the command printed at first."""
    return train()


@pytest.fixture(scope="module")
def trained(first: Ended, folder: Path) -> Path:
    """The folder of the run, finished, which no test changes."""
    return folder / "run"


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "copy", symlinks=True)


def test_a_run_ends_with_its_accuracy(first, trained):
    evaluation = read_metrics(trained)[-1]
    assert first.stdout.splitlines()[-1] == f"top1={evaluation['top1']:.4f}"
    assert f"epoch 2: top1 {evaluation['top1']:.4f}, top5 " in first.stdout


def test_its_progress_is_whole_lines_where_stderr_is_no_terminal(first, trained):
    evaluation = read_metrics(trained)[-1]
    start, *_, last = first.stderr.splitlines()
    steps = evaluation["step"]
    assert f" 0/{steps} " in start
    assert re.search(rf"{steps}/{steps} .*loss=.*img/s=.*top1={evaluation['top1']:.3f}", last)
    assert "\r" not in first.stderr


def test_a_run_on_a_cpu_has_no_flops_utilisation(trained):
    """Its peak is not known."""
    utilisations = []
    for record in read_metrics(trained):
        if record["kind"] == "train":
            utilisations.append(record["mfu"])
    assert set(utilisations) == {None}


@pytest.mark.parametrize("flag", ["--dry-run", "--set=MAX_STEPS=1"])
def test_the_rate_of_another_optimizer_is_warned_of_by_plan_and_start(flag, train, tmp_path):
    ended = train("--output", tmp_path / "new", "--set=OPTIMIZER.name=adamw", flag)
    line = "warning: LEARNING_RATE=0.01 is the config's for lamb, not for adamw: set it too"
    assert " ".join(ended.stderr.split()).count(line) == 1


def written_at(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_finished_run_is_left_as_it_is(train, trained):
    before = written_at(trained)
    ended = train(*in_words("LOG.every=1", "TIMEOUT=60", "KEEP=1"))
    assert ended.stderr == ""
    said = "this run is finished.* best top1 .*nothing was.*--set NUM_EPOCHS=N .now 2.*--output DIR"
    assert re.search(said, ended.words)
    assert written_at(trained) == before


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "LEARNING_RATE=5",
            " .was 0.01.: .* the earlier values; .*--allow-change LEARNING_RATE",
        ),
        ("MODEL.depth=7", ".* cannot be resumed with other values; .* .--init takes"),
    ],
)
def test_a_change_that_is_refused_leaves_the_run_as_it_is(setting, line, train, trained):
    before = written_at(trained)
    ended = train("--set", setting, code=2)
    assert ended.stdout == ""
    assert re.match(f"error: {setting}{line}", ended.stderr)
    assert len(ended.stderr.splitlines()) == 1
    assert written_at(trained) == before


REFUSED = {
    "--set MODEL.num_classes=2": "MODEL.num_classes=2: the data set has labels 0 to 2; ",
    "--set DATA.download=True": "DATA.download=True has no effect in this task: leave it out",
    "--set LOG.trackers=['wand']": "LOG.trackers=['wand']: expected tensorboard, wandb; did",
    "--class-order timm": "--classes, --class-order: only --init's weights have ",
    "--dry-run --set OPTIMIZER.name=sgd --set OPTIMIZER.nesterov=True --set "
    "OPTIMIZER.momentum=0": "OPTIMIZER.name=sgd: Nesterov momentum requires a momentum",
    "--set BEST=auroc": "BEST='auroc': of two classes only, these are 3; set it to ",
    "--set FREEZE=body": "FREEZE='body' without INIT starts from random weights: add --init",
    "--set OPTIMIZER.layer_decay=0.9": "OPTIMIZER.layer_decay=0.9 without INIT starts from ",
    "--config deit3_b16_finetune --set NUM_EPOCHS=20 --set TOTAL_BATCH_SIZE=8": (
        "--config deit3_b16_finetune without INIT starts from random weights: "
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_refused_start_leaves_no_folder(words, train, tmp_path):
    ended = train("--output", tmp_path / "new", *words.split(), code=2)
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"error: {REFUSED[words]}")
    assert list(tmp_path.iterdir()) == []


def test_a_resume_from_a_folder_without_a_run_leaves_no_folder(train, tmp_path):
    refused = train("--output", tmp_path / "new", "--resume", tmp_path, code=2).stderr
    said = f"error: --resume {tmp_path}: neither a checkpoint nor a run with one; "
    assert refused.startswith(said)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_start_leaves_the_users_own_folder(train, tmp_path):
    train("--output", tmp_path, *in_words("FREEZE=body"), code=2)
    assert tmp_path.exists()


@pytest.fixture
def branch(trained: Path) -> list[object]:
    """The words that branch off the run's first checkpoint."""
    start = min((trained / "checkpoints").glob("step-*"))
    return ["--resume", start, "--set=LEARNING_RATE=1e-9", "--set=NUM_EPOCHS=3"]


def test_a_branch_into_its_own_run_is_refused(train, branch):
    train(*branch, code=2)


def test_a_branch_with_nothing_to_train_is_refused(train, branch, tmp_path):
    start = json.loads((branch[1] / "trainer.json").read_text())["trainer"]["step"]
    for stop in (1, start):
        refused = train(*branch, "--output", tmp_path, f"--set=MAX_STEPS={stop}", code=2).stderr
        assert f"error: MAX_STEPS={stop} ends at step {stop}, " in refused


def test_a_branch_and_its_extension_train(train, branch, trained, tmp_path):
    before = read_folder(trained)
    branch += ["--output", tmp_path]
    stop = json.loads(before["config.json"])["plan"]["last_step"] + 1
    ended = train(*branch, f"--set=MAX_STEPS={stop}")
    assert "LEARNING_RATE=1e-09 from here on (was " in ended.stdout
    ended = train(*branch)
    assert f"resuming from {tmp_path}/checkpoints/step-{stop:08}\n" in ended.stdout
    assert read_metrics(tmp_path)[-1]["epoch"] == 3
    assert (tmp_path / "checkpoints" / "best").exists()
    assert read_folder(trained) == before
    assert "this run is finished" in train(*branch).words


def test_an_extension_and_a_change_on_purpose_are_in_the_runs_record(train, copy):
    more = ["--set=NUM_EPOCHS=3", "--set=LEARNING_RATE=1e-3", "--allow-change=LEARNING_RATE"]
    ended = train("--output", copy, *more)
    assert "LEARNING_RATE=0.001 from here on (was " in ended.stdout
    epochs = "NUM_EPOCHS=3 from here on (was 2); the learning rate follows the new schedule\n"
    assert epochs in ended.stdout
    assert read_metrics(copy)[-1]["epoch"] == 3
    start = json.loads((copy / "config.json").read_text())["starts"][-1]
    assert start["changed"] == {"NUM_EPOCHS": [2, 3], "LEARNING_RATE": [0.01, 0.001]}
    said = run_forked(evaluate.main, [copy]).stdout
    changes = "NUM_EPOCHS=3 (was 2), LEARNING_RATE=0.001 (was 0.01)"
    assert f"from step {start['step']} on {changes}" in said
    run_forked(report.main, [copy])
    assert "LEARNING_RATE=0.001 (was 0.01)" in (copy / "report.html").read_text()


def test_the_record_of_a_finished_run_without_checkpoints_is_not_overwritten(train, copy):
    shutil.rmtree(copy / "checkpoints")
    refused = train("--output", copy, code=2).stderr
    assert "holds a finished run without checkpoints, whose record would be overwritten" in refused
