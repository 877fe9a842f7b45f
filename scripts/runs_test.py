"""Rerunning a training command, in each of the three tasks: output, exit status, the run's folder."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from caltech101_amp import train as train_caltech
from caltech101_amp.testing import expect_miniature, write_categories
from cifar10_benchmark import train as train_cifar
from common.metrics.curves import read_metrics
from common.testing.commands import Ended, read_folder, run_forked
from common.testing.photographs import write_colours
from imagenet_dali import train_dali
from imagenet_dali.testing import prepare_data, write_config

SMALL = ["MODEL.image_size=16", "MODEL.patch_size=8", "MODEL.width=32", "MODEL.depth=1", "MODEL.heads=2",
         "MODEL.num_classes=None", "MODEL.dropout=0.0", "TOTAL_BATCH_SIZE=16", "WARMUP_EPOCHS=0",
         "NUM_EPOCHS=2", "LOG.tensorboard=False"]  # fmt: skip


class Trained(NamedTuple):
    """A finished run of two epochs, and its command."""

    main: Callable[[list[str]], None]
    config: str
    settings: list[str]
    output: Path
    first: Ended

    def again(self, *words: str, output: Path | None = None) -> Ended:
        """Rerun the command with ``words`` added."""
        settings = [word for setting in self.settings for word in ("--set", setting)]
        command = ["--config", self.config, "--output", output or self.output, *settings, *words]
        return run_forked(self.main, command, OMP_NUM_THREADS="1")


def write_images(folder: Path) -> Path:
    write_colours(folder / "train", 40, 16, 16)
    write_colours(folder / "test", 12, 16, 16, seed=1)
    return folder


@pytest.fixture(scope="module", params=["imagenet_dali", "cifar10_benchmark", "caltech101_amp"])
def trained(request, tmp_path_factory) -> Iterator[Trained]:
    folder, patch = tmp_path_factory.mktemp(request.param), pytest.MonkeyPatch()
    if request.param == "imagenet_dali":
        root, main, config = prepare_data(folder), train_dali.main, str(write_config(folder))
        settings = ["DATA.loader=torchvision", "DATA.workers=1"]
    elif request.param == "cifar10_benchmark":
        root, main, config, settings = write_images(folder / "data"), train_cifar.main, "vit_lite_vanilla", []
    else:
        expect_miniature(patch)
        root, main, config = write_categories(folder / "data"), train_caltech.main, "config_fp32"
        settings = ["DATA.workers=2", "MICRO_BATCH_SIZE=16"]
    run = Trained(main, config, [*SMALL, f"DATA.root={root}", *settings], folder / "run", Ended(0, "", ""))
    yield run._replace(first=run.again())
    patch.undo()


def test_a_run_ends_with_its_accuracy_and_no_traceback(trained: Trained) -> None:
    assert trained.first.code == 0, trained.first.stderr
    evaluation = read_metrics(trained.output)[-1]
    assert trained.first.stdout.splitlines()[-1] == f"top1={evaluation['top1']:.4f}"
    last = trained.first.stderr.splitlines()[-1]  # of its progress
    steps = evaluation["step"]
    assert f"{steps}/{steps}" in last
    assert f"top1={evaluation['top1']:.3f}" in last
    assert "loss=" in trained.first.stderr


def test_a_finished_run_is_left_as_it_is(trained: Trained) -> None:
    before = read_folder(trained.output)
    times = {path: path.stat().st_mtime_ns for path in trained.output.rglob("*")}
    for words in ([], ["--set", "LOG.every=1", "--set", "TIMEOUT=60", "--set", "KEEP=1"], ["--set", "NUM_EPOCHS=2"]):
        ended = trained.again(*words)
        assert (ended.code, ended.stderr) == (0, "")
        line = " ".join(ended.stdout.split())
        for part in ("this run is finished", "nothing was trained", "--set NUM_EPOCHS=N (now 2)", "--output DIR"):
            assert part in line
    assert read_folder(trained.output) == before
    assert {path: path.stat().st_mtime_ns for path in trained.output.rglob("*")} == times


def test_a_changed_key_is_refused_in_one_line(trained: Trained) -> None:
    before = read_folder(trained.output)
    ended = trained.again("--set", "LEARNING_RATE=5")
    assert (ended.code, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    rate = json.loads(before["config.json"])["config"]["LEARNING_RATE"]
    assert line.startswith(f"error: LEARNING_RATE=5 (was {rate!r}): ")
    assert " is finished; " in line
    for way in ("--output DIR", "--resume ", "--allow-change LEARNING_RATE"):
        assert way in line
    assert read_folder(trained.output) == before


def test_an_empty_output_is_refused(trained: Trained) -> None:
    ended = run_forked(trained.main, ["--config", trained.config, "--output", ""])
    assert (ended.code, ended.stderr) == (2, 'error: --output "" is empty: set a value or omit the flag\n')


def test_a_branch_and_an_extension_train(trained: Trained, tmp_path: Path) -> None:
    first = min((trained.output / "checkpoints").glob("step-*"))
    branch = ["--resume", str(first), "--set", "LEARNING_RATE=1e-3", "--set", "NUM_EPOCHS=3"]
    assert trained.again(*branch).code == 2
    before, output = read_folder(trained.output), tmp_path / "branch"
    stop = json.loads(before["config.json"])["plan"]["last_step"] + 1
    ended = trained.again(*branch, "--set", f"MAX_STEPS={stop}", output=output)
    assert ended.code == 0, ended.stderr
    assert "LEARNING_RATE=0.001 from here on (was " in ended.stdout
    ended = trained.again(*branch, output=output)
    assert ended.code == 0, ended.stderr
    assert f"resuming from {output}/checkpoints/step-{stop:08}\n" in ended.stdout
    assert read_metrics(output)[-1]["epoch"] == 3
    assert read_folder(trained.output) == before
    finished = read_folder(output)
    ended = trained.again(*branch, output=output)
    assert (ended.code, ended.stderr) == (0, "")
    assert "this run is finished" in " ".join(ended.stdout.split())
    assert read_folder(output) == finished


def test_it_is_extended_and_changed_on_purpose_last(trained: Trained) -> None:
    """The last test: it changes the run that the others share."""
    ended = trained.again("--set", "NUM_EPOCHS=3", "--set", "LEARNING_RATE=1e-3", "--allow-change", "LEARNING_RATE")
    assert ended.code == 0, ended.stderr
    assert "LEARNING_RATE=0.001 from here on (was " in ended.stdout
    assert (
        "NUM_EPOCHS=3 from here on (was 2); the learning rate follows the new schedule, so it rises again\n"
        in ended.stdout
    )
    assert read_metrics(trained.output)[-1]["epoch"] == 3
