"""Opening a run: which checkpoint is used, and how anything else is refused."""

import shutil
from pathlib import Path

import pytest

from common.checkpoint.content import CONFIG
from common.checkpoint.save import checkpoint_path, mark_best, write_checkpoint
from common.checkpoint.saved_run import open_run
from common.errors import UserError
from common.testing.checkpoints import build_content


def write_run(run: Path, *steps: int) -> list[Path]:
    paths = [checkpoint_path(run / "checkpoints", step) for step in steps]
    for path in paths:
        write_checkpoint(path, build_content())
    shutil.copy(paths[0] / CONFIG, run)
    return paths


def test_a_run_is_its_newest_checkpoint_unless_there_is_a_best(tmp_path):
    run = tmp_path / "run"
    first, newest = write_run(run, 4, 10)
    (run / "checkpoints" / "step-00000011").mkdir()  # not complete
    assert open_run(str(run)).checkpoint == newest
    mark_best(first)
    for name in (run, run / "checkpoints" / "best", first):
        opened = open_run(str(name))
        assert (opened.checkpoint, opened.folder) == (first, run)
    copied = shutil.copytree(first, tmp_path / "elsewhere" / "step")
    assert open_run(str(copied)).folder == copied.parent


def test_anything_else_is_refused(tmp_path):
    (path,) = write_run(tmp_path, 4)
    (path / "COMPLETE").unlink()
    with pytest.raises(UserError, match="no complete checkpoint in"):
        open_run(str(tmp_path))
    (tmp_path / CONFIG).unlink()
    with pytest.raises(UserError, match="neither a run .* nor a checkpoint .no COMPLETE"):
        open_run(str(tmp_path))
