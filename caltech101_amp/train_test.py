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
IMAGES = 60
SMALL = [
    "MODEL.image_size=16",
    "MODEL.patch_size=8",
    "MODEL.width=32",
    "MODEL.depth=2",
    "MODEL.heads=2",
    "MODEL.num_classes=None",
    "MODEL.dropout=0.0",
    "MICRO_BATCH_SIZE=None",
    "TOTAL_BATCH_SIZE=16",
    "NUM_EPOCHS=6",
    "WARMUP_EPOCHS=1",
    "LEARNING_RATE=0.1",
    "WEIGHT_DECAY=0.0",
    "LOG.every=1",
    "DATA.workers=0",
]


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A miniature that counts as complete: images of a colour for each category, and clutter."""
    monkeypatch.setattr(task, "CATEGORIES", len(NAMES))
    monkeypatch.setattr(task, "IMAGES", IMAGES)
    task._open.cache_clear()
    folder = tmp_path / "data" / task.FOLDER
    write_colours(folder, IMAGES, height=24, width=30, kind="jpg")
    (folder / "r").rename(folder / "accordion")
    shutil.copytree(folder / "g", folder / "BACKGROUND_Google")
    return tmp_path / "data"


def open_at(root: Path, split: str = "train") -> FolderSplit:
    return open_split({"root": str(root), "download": False}, split)


def paths(split: FolderSplit) -> list[str]:
    """Return the paths of the images from the root of the data set."""
    paths = []
    for index in range(len(split)):
        path = split.path(index).relative_to(split.root)
        paths.append(path.as_posix())
    return paths


# The images of the test split, the same in every version of this project.
TEST_PATHS = [
    "accordion/21.jpg",
    "accordion/27.jpg",
    "accordion/39.jpg",
    "accordion/9.jpg",
    "b/17.jpg",
    "b/2.jpg",
    "b/26.jpg",
    "b/56.jpg",
    "g/19.jpg",
    "g/22.jpg",
    "g/31.jpg",
    "g/40.jpg",
]


def test_a_fifth_of_each_category_is_for_testing(root):
    train = open_at(root)
    test = open_at(root, "test")
    assert paths(test) == TEST_PATHS
    train_paths = paths(train)
    assert len(train) == 48
    assert train_paths == sorted({*train_paths} - {*TEST_PATHS})


def test_labels_are_those_of_the_sorted_categories(root):
    test = open_at(root, "test")
    labels = []
    for first_of_category in (0, 4, 8):
        _, label = test.read(first_of_category)
        labels.append(label)
    assert labels == [0, 1, 2]


def test_the_data_are_described(root):
    data = task.TASK.describe({"root": str(root), "download": False})
    assert data.class_names == ["accordion", "b", "g"]
    assert data.validation == "20% of each category, held out"


def test_a_key_without_effect_is_refused():
    with pytest.raises(UserError, match="DATA.window=9 has no effect"):
        task.TASK.describe({"window": 9})


def test_the_archive_is_torchvisions():
    constants = {*Caltech101.download.__code__.co_consts}
    assert {task.URL, task.MD5} < constants


def test_either_archive_is_unpacked(root, tmp_path, monkeypatch):
    in_tar = tmp_path / "tar"
    in_zip = tmp_path / "zip"
    by_torchvision = tmp_path / "torchvision"
    outer = tmp_path / "outer"
    for folder in (in_tar, outer / "caltech-101"):
        shutil.make_archive(str(folder / "101_ObjectCategories"), "gztar", root, task.FOLDER)
    archive = shutil.make_archive(str(in_zip / "caltech-101"), "zip", outer, "caltech-101")
    md5 = hashlib.md5(Path(archive).read_bytes())
    monkeypatch.setattr(task, "MD5", md5.hexdigest())
    # what is left when a damaged tar in it is removed
    (in_zip / task.OUTER_FOLDER).mkdir()
    (tmp_path / task.OUTER_FOLDER).symlink_to(root)  # unpacked as it is, beside its archive
    by_torchvision.mkdir()
    (by_torchvision / "caltech101").symlink_to(root)
    run_ranks(4, task._unpack, in_tar, False)
    expected = open_at(root).fingerprint
    for folder in (root / task.FOLDER, tmp_path, in_tar, in_zip, by_torchvision):
        assert open_at(folder).fingerprint == expected


@pytest.mark.parametrize(
    ("removed", "words"),
    [
        ("", "has no 101_ObjectCategories/, .*--set DATA.download=True fetches Caltech-101"),
        ("g/1.jpg", "101_ObjectCategories: 3 categories with 59 images, not 3 with 60; unpack"),
    ],
)
def test_a_missing_or_partial_data_set_is_named_with_the_remedy(root, removed, words):
    path = root / task.FOLDER / removed
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)
    with pytest.raises(UserError, match=words):
        open_at(root)


def arguments(config: str, root: Path) -> list[str]:
    return [
        "--config",
        f"config/config_{config}.py",
        "--output",
        str(root.parent / config),
        *in_words(*SMALL, f"DATA.root={root}"),
    ]


def losses(output: Path) -> list[float]:
    result = []
    for record in read_metrics(output):
        if record["kind"] == "train":
            result.append(record["loss"])
    return result


def test_every_mode_learns_the_colours_in_two_processes_as_in_one(root):
    one = root.parent / "one"
    train.main([*arguments("fp32", root), "--output", str(one)])
    expected = losses(one)
    assert len(expected) == 18
    for mode in ("fp32", "AMP_torch", "AMP_naive", "AMP_apex"):
        output = root.parent / mode
        run_ranks(2, train.main, arguments(mode, root))
        rounding = dict(abs=0.05)
        if mode == "fp32":
            rounding = dict(rel=1e-4)
        assert losses(output) == pytest.approx(expected, **rounding)
        evaluation = read_metrics(output)[-1]
        assert evaluation["samples"] == 12
        assert evaluation["top1"] > 0.6
    evaluate.main([str(output)])
    (path,) = output.glob("evaluation/*/evaluation.json")
    found = json.loads(path.read_text())
    assert found["top1"] == evaluation["top1"]
    assert found["samples"] == evaluation["samples"]
