"""The readers of images: the same with workers, what is augmented, and bad images."""

import os
import random
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from torchvision.transforms import functional as F

from common.config.schema import Data
from common.data.bad_images import BadImages
from common.data.batch_augment_test import MEAN, STD
from common.data.crops import CROP_UNIFORMS, CenterCrop, Crop, RandomCrop, SimpleCrop
from common.data.image_folder import list_classes, list_folders
from common.data.image_loaders import ImageReader, build_eval_loader, build_train_loader
from common.data.image_split import FolderSplit
from common.data.loader import Loader
from common.data.sampler import NO_LABEL, EvalSampler, TrainSampler
from common.errors import UserError
from common.testing.commands import run_python
from common.testing.photographs import write_colours

SIZE = 24
CPU = torch.device("cpu")


@pytest.fixture
def split(tmp_path) -> FolderSplit:
    return open_folder(write_colours(tmp_path, 20, 30, 40))


def open_folder(root: Path) -> FolderSplit:
    names = list_folders(root)
    return FolderSplit(root, names, list_classes(root, root, names))


def reader(split, crop, workers: int = 0, dp_size: int = 1) -> ImageReader:
    return ImageReader(
        split,
        crop,
        size=SIZE,
        mean=MEAN,
        std=STD,
        workers=workers,
        device=CPU,
        dp_size=dp_size,
    )


def eval_loader(split, workers: int = 0) -> Loader:
    sampler = EvalSampler(20, 20)
    return Loader(sampler, reader(split, CenterCrop(SIZE, 28), workers))


@pytest.mark.parametrize("text", ["rand-m9-mstd0.5-inc1", "rand-m10-n8-inc1"])
def test_a_text_is_timms_randaugment_after_the_crop(split, text, monkeypatch):
    mean = (0.6, 0.6, 0.6)
    std = (1 / 255, 1 / 255, 1 / 255)
    data = Data(workers=0, mean=mean, std=std, interpolation="bicubic").model_dump()
    place = dict(image_size=SIZE, device=CPU, seed=5)
    plain = build_train_loader(split, data, 8, 4, **place)
    augmented = build_train_loader(split, data | {"randaugment": text}, 8, 4, **place)
    batches = list(augmented)
    options = dict(auto_augment=text, interpolation="bicubic", mean=mean)
    theirs = create_transform(SIZE, True, **options).transforms[2]
    # timm keeps 0 bits at the largest magnitude, which Pillow 13 refuses
    monkeypatch.setattr(ImageOps, "posterize", keep_bits)
    draws = augmented.sampler.draws(0)
    for draw, (originals, _), (images, _) in zip(draws, plain, batches, strict=True):
        original_pixels = (originals + 153).byte()
        pixels = (images + 153).byte()
        rows = zip(original_pixels, pixels, draw.uniforms, strict=True)
        for original, image, numbers in rows:
            chance = int(2**32 * numbers[-1])
            random.seed(chance)
            np.random.seed(chance)
            expected = theirs(F.to_pil_image(original))
            assert torch.equal(image, F.pil_to_tensor(expected))


def keep_bits(image: Image.Image, bits: int) -> Image.Image:
    mask = -(2 ** (8 - bits))
    return image.point(lambda value: value & mask)


def test_the_config_decides_the_crops():
    schema = Data(
        crop_scale=(0.2, 0.5),
        crop_ratio=(1, 2),
        eval_crop=0.9,
        interpolation="bicubic",
        flip=False,
        repeats=2,
        window=3,
        mean=MEAN,
        std=STD,
    )
    data = schema.model_dump()
    images = mock.MagicMock()
    images.__len__.return_value = 20

    def build_reader(images: Any, crop: Crop, **options: Any) -> tuple[Crop, dict]:
        return crop, options

    place = dict(image_size=SIZE, device=CPU, dp_size=2, build_reader=build_reader)
    train = build_train_loader(images, data, 8, 4, seed=5, **place)
    crop, options = train.reader
    assert crop == RandomCrop((0.2, 0.5), (1, 2), False, "bicubic")
    assert options["mean"] == MEAN
    assert options["std"] == STD
    assert options["size"] == SIZE
    assert train.sampler.repeats == 2
    assert train.sampler.window == 3

    evaluation = build_eval_loader(images, data, 6, **place)
    crop, _ = evaluation.reader
    assert crop == CenterCrop(SIZE, 26, "bicubic")

    data["crop"] = "simple"
    train = build_train_loader(images, data, 8, 4, seed=5, **place)
    crop, _ = train.reader
    assert crop == SimpleCrop(SIZE, False, "bicubic")


def test_workers_change_nothing_and_leave_with_the_loader(split):
    before = set(active_children())
    sampler = TrainSampler(20, 8, 4, seed=5, num_uniforms=CROP_UNIFORMS)
    here = Loader(sampler, reader(split, RandomCrop(), workers=0))
    loader = Loader(sampler, reader(split, RandomCrop(), workers=2))
    next(iter(loader))  # epoch 0, left early
    here.load_state_dict({"epoch": 1, "samples": 0})
    torch.testing.assert_close(list(loader), list(here), rtol=0, atol=0)
    started = set(active_children()) - before
    assert len(started) >= 2
    loader.close()
    assert set(active_children()) <= before


def test_workers_compute_though_threads_of_their_parent_have_leave_its_objects_and_end_with_it():
    program = """
import gc, os, torch
from common.data.workers import WorkerPool
pool = WorkerPool(lambda size: torch.ones(size).sum().item() * (gc.get_freeze_count() > 0), 1)
pool.start()
print(torch.ones(1 << 20).sum().item(), *pool.map(iter([1 << 20])), flush=True)
os.kill(os.getpid(), 9)"""  # an orphan would keep the pipe open
    two_threads = os.environ | {"OMP_NUM_THREADS": "2"}
    ended = run_python(program, env=two_threads, timeout=60)
    assert ended.stdout == "1048576.0 1048576.0\n"


BAD = {
    7: "cannot identify image file",
    8: "20000x9999 is more than 100 million pixels",
    9: "No such file or directory",
}


def test_chance_may_deal_a_process_some_more_bad_images():
    """Of 500 images 1% are bad, and the standard deviation of their number is about 2.2."""
    messages = ["x" for _ in range(14)]
    BadImages(500).add(messages[:13])
    with pytest.raises(UserError, match="14 of the 500 images .* more than 1%"):
        BadImages(500).add(messages)


def damage(split: FolderSplit) -> None:
    """Make the images of ``BAD`` what their messages say."""
    Image.new("L", (8, 8)).save(split.path(7), "EPS")  # runs as a PostScript program
    split.path(8).write_bytes(b"P4 20000 9999\n".ljust(1 << 25))  # the bits may follow
    split.path(9).unlink()
    split.path(9).symlink_to("nowhere")


def test_many_bad_images_stop_the_pass(split):
    damage(split)
    read = reader(split, CenterCrop(SIZE, 28), dp_size=2).read
    draws = EvalSampler(20, 4).draws(0)
    words = "2 of the 10 images that this process reads in a pass are bad, more than 1%"
    with pytest.raises(UserError, match=f"^{split.path(8)}: .*{words}$"):
        list(read(draws))


@pytest.mark.parametrize(("workers", "named"), [(0, 3), (1, 2)])
def test_bad_images_are_left_out_and_named_once(split, monkeypatch, capsys, workers, named):
    (batch,) = eval_loader(split)
    images, labels = batch
    damage(split)
    monkeypatch.setattr("common.data.bad_images.MAX_BAD_SHARE", 0.15)
    monkeypatch.setattr("common.data.bad_images.NAMED", named)
    loader = eval_loader(split, workers)
    bad = list(BAD)
    images[bad] = 0
    labels[bad] = NO_LABEL
    for _ in range(2):
        torch.testing.assert_close(list(loader), [(images, labels)], rtol=0, atol=0)
    loader.close()
    lines = [
        f"skipped: {split.path(row)}: {reason}; remove or replace this image"
        for row, reason in BAD.items()
    ]
    assert capsys.readouterr().err.splitlines() == lines[:named]


def test_a_fingerprint_is_of_paths_labels_and_class_names(tmp_path):
    lists = [
        [("1", 0), ("2", 1)],
        [("1", 1), ("2", 0)],
        [("1", 0), ("3", 1)],
    ]
    found = set()
    for names in ("ab", "ac"):
        for files in lists:
            split = FolderSplit(tmp_path, names, files)
            found.add(split.fingerprint)
    assert len(found) == 6
