"""Opening a run: which checkpoint is used, and how anything else is refused."""

import shutil
from pathlib import Path

import pytest

from common.checkpoint.saved_run import open_run
from common.engine.upstream import AMP_TYPE
from common.errors import UserError
from common.testing.tiny_task import NAMES, train


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    return train(
        data,
        tmp_path_factory.mktemp("task") / "run",
        "fp16.mode=AMP_TYPE.TORCH",
        "MODEL.num_classes=8",
    )


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def test_a_run_is_its_newest_checkpoint_unless_there_is_a_best(run):
    checkpoints = run / "checkpoints"
    for name in ("best", "best.txt"):
        (checkpoints / name).unlink()
    shutil.copytree(checkpoints / "step-00000010", checkpoints / "step-00000004")
    (checkpoints / "step-00000011").mkdir()  # not complete
    assert open_run(str(run)).checkpoint == checkpoints / "step-00000010"
    (checkpoints / "best").symlink_to("step-00000004")
    (checkpoints / "best.txt").write_text("step-00000004")
    for name in (run, checkpoints / "best", checkpoints / "step-00000004"):
        opened = open_run(str(name))
        assert (opened.checkpoint, opened.folder) == (checkpoints / "step-00000004", run)
    copied = shutil.copytree(checkpoints / "best", run.parent / "elsewhere" / "step")
    assert open_run(str(copied)).folder == copied.parent


def test_the_config_comes_back_as_it_was(trained):
    opened = open_run(str(trained), ["MICRO_BATCH_SIZE=5", "DATA.eval_crop=1.0"])
    assert opened.config["fp16"] == {"mode": AMP_TYPE.TORCH}
    assert opened.config["DATA"]["crop_scale"] == (0.08, 1.0)
    assert (opened.batch, opened.config["DATA"]["eval_crop"]) == (5, 1.0)
    assert open_run(str(trained)).batch == 14
    assert opened.class_names == [*NAMES, "7"]


def test_anything_else_is_refused(run):
    for file, words in (
        ("checkpoints/step-00000010/COMPLETE", "no complete checkpoint in"),
        (
            "config.json",
            r"neither a run \(it has no config.json\) nor a checkpoint \(no COMPLETE\)",
        ),
    ):
        (run / file).unlink()
        with pytest.raises(UserError, match=words):
            open_run(str(run))
