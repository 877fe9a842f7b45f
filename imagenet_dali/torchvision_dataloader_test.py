"""The torchvision loader on a prepared data set."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import functional as F

from common.data.crops import CenterCrop
from common.data.loader import Loader
from common.data.sampling import NO_LABEL, EvalSampler
from common.data.torchvision_dataloader import TorchvisionReader
from imagenet_dali.dataset import open_split
from imagenet_dali.prepare import prepare
from imagenet_dali.repair import repair
from imagenet_dali.testing import jpeg, spoil_record

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 24


def test_shows_what_torchvision_shows(tmp_path):
    random = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 5)):
        for name in ("ape", "bee"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                height, width = random.integers(25, 60, 2).tolist()
                image = Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
                image.save(folder / f"{number}.{'png' if number % 2 else 'jpg'}")
    prepare(tmp_path / "images", tmp_path / "data")
    split = open_split(tmp_path / "data", "validation")
    reader = TorchvisionReader(
        split, CenterCrop(SIZE, 28), size=SIZE, mean=MEAN, std=STD, workers=0, device=torch.device("cpu")
    )
    images, labels = (torch.cat(parts) for parts in zip(*Loader(EvalSampler(10, 4), reader), strict=True))
    assert sorted(labels.tolist()) == [NO_LABEL] * 2 + [0] * 5 + [1] * 5
    for index in range(10):
        jpeg = tmp_path / "image.jpg"
        jpeg.write_bytes(split.read(index)[0])
        with Image.open(jpeg) as image:
            expected = F.normalize(F.to_tensor(F.center_crop(F.resize(image, 28), SIZE)), MEAN, STD)
        # a value of 255 rounded the other way
        torch.testing.assert_close(images[index], expected, rtol=0, atol=1.01 / 255 / min(STD))
        assert labels[index] == split.read(index)[1]


def test_a_record_that_went_bad_is_left_out_until_it_is_repaired(tmp_path, capsys):
    for label in range(2):
        folder = tmp_path / "images" / f"class_{label}"
        folder.mkdir(parents=True)
        for number in range(100):
            (folder / f"{number}.jpg").write_bytes(jpeg(30, 40, number))
    prepare(tmp_path / "images", tmp_path / "data")
    shard = spoil_record(tmp_path / "data", "train", 11)
    kept = [label for index, label in enumerate(open_split(tmp_path / "data", "train").records["label"]) if index != 11]
    assert read_labels(tmp_path / "data") == kept
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"left out: {shard}: record 11 of train at byte ")
    assert line.endswith(
        f"python -m imagenet_dali.prepare --check --repair {tmp_path / 'data'}` to continue without the bad records"
    )
    assert len(repair(tmp_path / "data", 1)) == 1
    assert read_labels(tmp_path / "data") == kept
    assert capsys.readouterr().err == ""


def read_labels(root: Path) -> list[int]:
    """Return the labels of the samples that a pass of evaluation over the training split counts."""
    split = open_split(root, "train")
    reader = TorchvisionReader(
        split, CenterCrop(SIZE, 28), size=SIZE, mean=MEAN, std=STD, workers=0, device=torch.device("cpu")
    )
    labels = torch.cat([labels for _, labels in Loader(EvalSampler(len(split), 16), reader)])
    return labels[labels != NO_LABEL].tolist()
