"""Every layout of a source folder, and every folder that is none."""

import errno
import os
from collections import Counter

import pytest

from common.errors import UserError
from imagenet_dali.preparation import plan_shards
from imagenet_dali.sources import list_source


def fill(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"image")
    return root


def test_class_folders_are_split_by_class(tmp_path):
    fill(tmp_path, *(f"{name}/{i}.jpg" for name, n in (("b", 20), ("a", 10), ("c", 1)) for i in range(n)), ".git/x")
    source = list_source(tmp_path)
    assert source.class_names == ["a", "b", "c"]
    counts = {split: Counter(label for _, label in files) for split, files in source.splits.items()}
    assert counts == {"train": {0: 8, 1: 16, 2: 1}, "validation": {0: 2, 1: 4}}
    everything = [name for files in source.splits.values() for name, _ in files]
    assert sorted(everything) == sorted(f"{path.parent.name}/{path.name}" for path in tmp_path.glob("[abc]/*"))
    assert list_source(tmp_path) == source
    assert list_source(tmp_path, seed=1).splits != source.splits
    assert list(list_source(tmp_path, validation_share=0).splits) == ["train"]


@pytest.mark.parametrize("evaluation", ["val", "validation", "test"])
def test_split_folders_share_their_labels(tmp_path, evaluation):
    fill(tmp_path, "train/a/1", "train/b/deep/er/2", "train/b/.DS_Store", f"{evaluation}/b/3")
    source = list_source(tmp_path)
    assert source.splits == {
        "train": [("train/a/1", 0), ("train/b/deep/er/2", 1)],
        "validation": [(f"{evaluation}/b/3", 1)],
    }
    with pytest.raises(UserError, match="--validation-share=0.5"):
        list_source(tmp_path, validation_share=0.5)


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
    def scandir(path):
        if str(path).endswith("deep"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    real = os.scandir
    fill(tmp_path, *(f"{name}/{i}.jpg" for name in "ab" for i in range(5)), "b/deep/1.jpg")
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="b/deep"):
        list_source(tmp_path)


def imagenet(root):
    return fill(root, "train/n02/n02_1.JPEG", "train/n01/n01_1.JPEG", "val/v_2.JPEG", "val/v_1.JPEG", "val/v_3.JPEG")


EXPECTED = [("val/v_1.JPEG", 1), ("val/v_2.JPEG", 0), ("val/v_3.JPEG", 1)]


def test_imagenet_with_the_labels_of_tensorflow(tmp_path):
    path = imagenet(tmp_path) / "imagenet_2012_validation_synset_labels.txt"
    path.write_text("n02\nn01\nn02\n")
    (tmp_path / "imagenet_metadata.txt").write_text("n01\ttench, Tinca tinca\nn02\tgoldfish\nn03\tnot here\n")
    source = list_source(tmp_path)
    assert source.splits["validation"] == EXPECTED
    assert source.class_names == ["tench, Tinca tinca", "goldfish"]
    path.write_text("n02\nn01\n")
    with pytest.raises(UserError, match="2 labels for 3 files"):
        list_source(tmp_path)
    path.write_text("n02\nn01\nn09\n")
    with pytest.raises(UserError, match=r"v_3.JPEG has label n09"):
        list_source(tmp_path)


def test_imagenet_with_the_labels_of_kaggle(tmp_path):
    root = imagenet(tmp_path / "ILSVRC" / "Data" / "CLS-LOC")
    with pytest.raises(
        UserError, match=r"put imagenet_2012_validation_synset_labels.txt, LOC_val_solution.csv or ILSV"
    ):
        list_source(root)
    boxes = "ImageId,PredictionString\nv_3,n02 1 2 3 4 n02 5 6 7 8 \nv_1,n02 1 2 3 4 \nv_2,n01 1 2 3 4 \n"
    (tmp_path / "LOC_val_solution.csv").write_text(boxes)
    (tmp_path / "LOC_synset_mapping.txt").write_text("n01 tench, Tinca tinca\nn02 goldfish\n")
    source = list_source(root)
    assert source.splits["validation"] == EXPECTED
    assert source.class_names == ["tench, Tinca tinca", "goldfish"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "0 class folders"),
        (["1.jpg", "2.jpg"], "0 class folders"),
        (["wrapper/a/1", "wrapper/b/2"], "is .*wrapper the folder you mean"),
        (["train/a/1", "train/b/2", "val/c/3"], "val/c: this class has no training images"),
        (["train/1.jpg", "train/2.jpg", "test/3.jpg"], "test, train are splits, not classes"),
        (["a/1", "b/.hidden"], "b: no images"),
        (["train/a/1", "train/b/2", "val/.hidden"], "val: no images"),
    ],
)
def test_a_folder_without_a_known_layout_is_refused(tmp_path, names, message):
    with pytest.raises(UserError, match=message):
        list_source(fill(tmp_path, *names))


def test_a_plan_holds_each_image_once_and_mixes_the_classes(tmp_path):
    source = list_source(fill(tmp_path, *(f"{name}/{i:03d}" for name in "abcd" for i in range(50))))
    plan = plan_shards(source, 8, seed=0)
    assert [name for name in plan if "validation" in name] == [
        f"validation/validation-0000{i}-of-00002" for i in (0, 1)
    ]
    assert sum(name.startswith("train/train-") for name in plan) == 8
    for split, files in source.splits.items():
        assert sorted(file for name in plan for file in plan[name] if name.startswith(split)) == sorted(files)
    assert all(len(files) == 20 and len({label for _, label in files}) == 4 for files in plan.values())
    assert plan_shards(source, 8, seed=1) != plan
    assert len(plan_shards(source, None, seed=0)) == 2
    with pytest.raises(UserError, match="--shards=161"):
        plan_shards(source, 161, seed=0)
