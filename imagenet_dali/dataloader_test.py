from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common.config.schema import Data, plain_values
from common.data.sampling import NO_LABEL
from common.errors import UserError
from imagenet_dali import imagenet_dali_dataloader
from imagenet_dali.dataloader import build_eval_loader, build_train_loader, describe_data, open_images
from imagenet_dali.dataset import open_split
from imagenet_dali.imagenet_dali_dataloader import DaliReader
from imagenet_dali.manifest import data_fingerprint, read_manifest
from imagenet_dali.repair import repair
from imagenet_dali.testing import spoil_record

# Python 3.12 warns of every fork beside threads, which is how torch starts its workers there
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

DATA = plain_values(Data(workers=1, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)))
PLACED = {"image_size": 28, "dp_rank": 0, "dp_size": 1, "device": torch.device("cpu")}


@pytest.fixture(scope="session")
def folder(photographs: Path) -> Path:
    return photographs / "images"


@pytest.fixture(scope="session")
def root(photographs: Path) -> Path:
    return photographs / "shards"


def test_describes_a_folder_and_what_was_prepared_from_it(folder, root):
    found = [
        describe_data({"root": str(place), "loader": loader})
        for place, loader in ((folder, "torchvision"), (root, "torchvision"), (root, "dali"))
    ]
    assert {(data.train_samples, data.eval_samples, data.num_classes) for data in found} == {(24, 10, 2)}
    assert [data.class_names for data in found] == [["ape", "bee"]] * 3
    assert found[0].fingerprint != found[1].fingerprint
    assert found[1] == found[2]
    assert found[1].fingerprint == data_fingerprint(read_manifest(root))


@pytest.mark.parametrize(
    ("interpolation", "order", "crop", "randaugment", "resizes"),
    [
        ("bilinear", "random", "random_resized", None, False),
        ("bicubic", "blocks", "random_resized", None, False),
        ("bicubic", "random", "simple", None, False),
        ("bicubic", "random", "random_resized", (2, 10), False),
        ("bicubic", "random", "random_resized", (2, 10), True),  # as on a GPU: in batches after DALI
    ],
)
def test_both_loaders_show_the_same(root, interpolation, order, crop, randaugment, resizes, monkeypatch):
    monkeypatch.setattr(imagenet_dali_dataloader, "DaliReader", partial(DaliReader, resizes=resizes))
    shown = {}
    for name in ("dali", "torchvision"):
        data = {**DATA, "root": str(root), "loader": name, "interpolation": interpolation, "order": order}
        data |= {"crop": crop, "block": 0.004, "randaugment": randaugment}  # block in MB
        train = build_train_loader(data, 8, 4, seed=1, **PLACED)
        evaluation = build_eval_loader(data, 4, **PLACED)
        assert (len(train), len(evaluation)) == (6, 3)
        shown[name] = [*train, *train, *evaluation]
        train.close()
        evaluation.close()
    for (images, labels), (other_images, other_labels) in zip(*shown.values(), strict=True):
        assert torch.equal(labels, other_labels)
        assert (images - other_images).abs().mean() < 0.6 / 255 / 0.25


def test_the_config_decides_crops_and_normalisation(root):
    data = {**DATA, "root": str(root), "loader": "dali"}
    whole = {"crop_scale": (1.0, 1.0), "crop_ratio": (1e-3, 1e3), "flip": False}

    def first(**changes: object) -> torch.Tensor:
        loader = build_eval_loader({**data, **changes}, 4, **PLACED)
        images, _ = next(iter(loader))
        loader.close()
        return images

    torch.testing.assert_close(first(mean=(0, 0, 0), std=(1, 1, 1)), first() * 0.25 + 0.5)
    assert (first() - first(eval_crop=1.0)).abs().mean() > 0.01
    loader = build_train_loader({**data, **whole}, 8, 8, seed=1, **PLACED)
    assert loader.reader.crop.scale == (1.0, 1.0)
    assert loader.reader.crop.flip is False
    loader.close()


@pytest.mark.parametrize("workers", [None, 0])
def test_workers_may_be_left_to_the_machine(root, workers):
    loader = build_eval_loader({**DATA, "root": str(root), "loader": "dali", "workers": workers}, 4, **PLACED)
    assert len(list(loader)) == 3
    loader.close()


def test_wrong_places_are_refused(folder, root, tmp_path):
    for name in ("ape", "bee"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / name / "only.png")
    cases = [
        ("dali", folder, "train", "manifest.json: missing; run `python -m imagenet_dali.prepare"),
        ("torchvision", tmp_path, "train", "1 class folders"),
        ("torchvision", tmp_path / "nowhere", "train", "no such folder"),
        ("torchvision", tmp_path / "images", "validation", f"DATA.root={tmp_path}/images has no validation split"),
    ]
    for loader, place, split, message in cases:
        with pytest.raises(UserError, match=message):
            open_images({"root": str(place), "loader": loader}, split)


def test_blocks_are_refused_where_there_are_no_shards(folder):
    with pytest.raises(UserError, match=r"DATA.order='blocks': .* has no shards; `python -m imagenet_dali"):
        describe_data({**DATA, "root": str(folder), "loader": "torchvision", "order": "blocks"})


def test_randaugment_follows_the_crop_and_differs_between_samples_and_epochs(root):
    data = {**DATA, "root": str(root), "loader": "torchvision", "flip": False, "workers": 0}
    data |= {"crop_scale": (1.0, 1.0), "crop_ratio": (1e-3, 1e3), "mean": (0, 0, 0), "std": (1 / 255,) * 3}
    plain, augmented = (build_train_loader(data | {"randaugment": (2, 10)}, 8, 4, seed=1, **PLACED) for _ in range(2))
    reader = augmented.reader._pool.function
    plain.reader._pool.function.augment = None
    for epoch in range(2):
        for draw, (images, _), (others, _) in zip(augmented.sampler.draws(epoch), plain, augmented, strict=True):
            for row, (image, other) in enumerate(zip(images, others, strict=True)):
                whole = Image.fromarray(image.permute(1, 2, 0).round().byte().numpy())
                expected = reader.augment(whole, draw.uniforms[row, -4:])
                assert torch.equal(torch.from_numpy(np.array(expected)).permute(2, 0, 1), other.round().byte())


def read_labels(root: Path, workers: int) -> list[int]:
    """Return the labels of the samples that evaluation counts."""
    loader = build_eval_loader({**DATA, "root": str(root), "loader": "torchvision", "workers": workers}, 16, **PLACED)
    labels = torch.cat([labels for _, labels in loader])
    loader.close()
    return labels[labels != NO_LABEL].tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_record_that_went_bad_is_left_out_until_it_is_repaired(data, workers, capsys, monkeypatch):
    monkeypatch.setattr("common.data.corrupt_images.MAX_BAD_SHARE", 0.02)  # one of 60
    labels = open_split(data, "validation").records["label"].tolist()
    shard = spoil_record(data, "validation", 11)
    assert read_labels(data, workers) == labels[:11] + labels[12:]
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"skipped: {shard}: record 11 of validation at byte ")
    assert line.endswith(f"prepare --check --repair {data}` to continue without the bad records")
    assert len(repair(data, 1)) == 1
    assert read_labels(data, workers) == labels[:11] + labels[12:]
    assert capsys.readouterr().err == ""
