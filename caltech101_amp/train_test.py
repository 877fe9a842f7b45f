"""A miniature of the data set is unpacked, split, and trained on in every precision."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from torchvision.datasets import Caltech101

from caltech101_amp import task, train
from caltech101_amp.task import open_split
from common.data.image_split import FolderSplit
from common.errors import UserError
from common.metrics.metrics_file import read_metrics
from common.testing.commands import in_words
from common.testing.photographs import write_colours
from common.testing.ranks import run_ranks
from common.tools import evaluate

NAMES = ("accordion", "b", "g")
PER_CATEGORY = 20
SMALL = ["MODEL.image_size=16", "MODEL.patch_size=8", "MODEL.width=32", "MODEL.depth=2",
         "MODEL.heads=2", "MODEL.num_classes=None", "MODEL.dropout=0.0", "MICRO_BATCH_SIZE=None",
         "TOTAL_BATCH_SIZE=16", "NUM_EPOCHS=6", "WARMUP_EPOCHS=1",
         "LEARNING_RATE=0.1", "WEIGHT_DECAY=0.0", "LOG.every=1", "DATA.workers=0"]  # fmt: skip


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A miniature that counts as complete: images of a colour for each category, and clutter."""
    monkeypatch.setattr(task, "CATEGORIES", len(NAMES))
    monkeypatch.setattr(task, "IMAGES", len(NAMES) * PER_CATEGORY)
    task._open.cache_clear()
    folder = write_colours(
        tmp_path / "data" / task.FOLDER, len(NAMES) * PER_CATEGORY, 24, 30, "jpg"
    )
    (folder / "r").rename(folder / "accordion")
    shutil.copytree(folder / "g", folder / "BACKGROUND_Google")
    return tmp_path / "data"


def open_at(root: Path, split: str = "train") -> FolderSplit:
    return open_split({"root": str(root), "download": False}, split)


def paths(split: FolderSplit) -> list[str]:
    return [split.path(index).relative_to(split.root).as_posix() for index in range(len(split))]


def test_a_fifth_of_each_category_is_for_testing(root):
    train = open_at(root)
    test = open_at(root, "test")
    data = task.TASK.describe({"root": str(root), "download": False})
    assert (data.class_names, data.validation) == (list(NAMES), "20% of each category, held out")
    # the same in every version of this project
    numbers = iter([21, 27, 39, 9, 17, 2, 26, 56, 19, 22, 31, 40])
    assert paths(test) == [f"{name}/{next(numbers)}.jpg" for name in NAMES for _ in range(4)]
    assert (len(train), paths(train)) == (48, sorted({*paths(train)} - {*paths(test)}))
    assert [test.read(row)[1] for row in range(0, 12, 4)] == [0, 1, 2]


def test_either_archive_is_unpacked(root, tmp_path, monkeypatch):
    assert {task.URL, task.MD5} < {*Caltech101.download.__code__.co_consts}
    with pytest.raises(UserError, match="DATA.window=9 has no effect"):
        task.TASK.describe({"window": 9})
    roots = [root, root / task.FOLDER, tmp_path]
    roots += [tmp_path / name for name in ("tar", "zip", "torchvision")]
    outer = tmp_path / "outer"
    for folder in (tmp_path / "tar", outer / "caltech-101"):
        shutil.make_archive(str(folder / "101_ObjectCategories"), "gztar", root, task.FOLDER)
    path = shutil.make_archive(str(tmp_path / "zip/caltech-101"), "zip", outer, "caltech-101")
    monkeypatch.setattr(task, "MD5", hashlib.md5(Path(path).read_bytes()).hexdigest())
    # what is left when a damaged tar in it is removed
    (tmp_path / "zip" / task.OUTER_FOLDER).mkdir()
    (tmp_path / task.OUTER_FOLDER).symlink_to(root)  # unpacked as it is, beside its archive
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "caltech101").symlink_to(root)
    run_ranks(4, task._unpack, tmp_path / "tar", False)
    assert len({open_at(folder).fingerprint for folder in roots}) == 1


@pytest.mark.parametrize(
    ("removed", "words"),
    [
        ("", "has no 101_ObjectCategories/, .*--set DATA.download=True fetches Caltech-101"),
        ("g/1.jpg", "101_ObjectCategories: 3 categories with 59 images, not 3 with 60; unpack"),
    ],
)
def test_a_missing_or_partial_data_set_is_named_with_the_remedy(root, removed, words):
    path = root / task.FOLDER / removed
    path.unlink() if path.is_file() else shutil.rmtree(path)
    with pytest.raises(UserError, match=words):
        open_at(root)


def arguments(config: str, root: Path) -> list[str]:
    words = in_words(*SMALL, f"DATA.root={root}")
    return ["--config", f"config/config_{config}.py", "--output", str(root.parent / config), *words]


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(output) if record["kind"] == "train"]


def test_every_mode_learns_the_colours_in_two_processes_as_in_one(root):
    one = root.parent / "one"
    train.main([*arguments("fp32", root), "--output", str(one)])
    assert len(losses(one)) == 18
    for mode in ("fp32", "AMP_torch", "AMP_naive", "AMP_apex"):
        output = root.parent / mode
        run_ranks(2, train.main, arguments(mode, root))
        rounding = dict(rel=1e-4) if mode == "fp32" else dict(abs=0.05)
        assert losses(output) == pytest.approx(losses(one), **rounding)
        evaluation = read_metrics(output)[-1]
        assert evaluation["samples"] == 12
        assert evaluation["top1"] > 0.6
    evaluate.main([str(output)])
    (path,) = output.glob("evaluation/*/evaluation.json")
    found = json.loads(path.read_text())
    assert (found["top1"], found["samples"]) == (evaluation["top1"], evaluation["samples"])
