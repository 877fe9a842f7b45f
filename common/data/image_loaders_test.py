"""The readers of images: the same with workers, what is augmented, and bad images."""

import os
import random
from multiprocessing import active_children
from pathlib import Path
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
from common.data.crops import CROP_UNIFORMS, CenterCrop, RandomCrop, SimpleCrop
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
    place = dict(workers=workers, device=CPU, dp_size=dp_size)
    return ImageReader(split, crop, size=SIZE, mean=MEAN, std=STD, **place)


def eval_loader(split, workers: int = 0) -> Loader:
    return Loader(EvalSampler(20, 20), reader(split, CenterCrop(SIZE, 28), workers))


@pytest.mark.parametrize("text", ["rand-m9-mstd0.5-inc1", "rand-m10-n8-inc1"])
def test_a_text_is_timms_randaugment_after_the_crop(split, text, monkeypatch):
    mean = (0.6,) * 3
    data = Data(workers=0, mean=mean, std=(1 / 255,) * 3, interpolation="bicubic").model_dump()
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
    values = dict(crop_scale=(0.2, 0.5), crop_ratio=(1, 2), eval_crop=0.9, interpolation="bicubic")
    data = Data(flip=False, repeats=2, window=3, mean=MEAN, std=STD, **values).model_dump()
    place = dict(image_size=SIZE, device=CPU, dp_size=2)
    place["build_reader"] = lambda images, crop, **options: (crop, options)
    images = mock.MagicMock()
    images.__len__.return_value = 20
    train = build_train_loader(images, data, 8, 4, seed=5, **place)
    crop, options = train.reader
    assert crop == RandomCrop((0.2, 0.5), (1, 2), False, "bicubic")
    assert (options["mean"], options["std"], options["size"]) == (MEAN, STD, SIZE)
    assert (train.sampler.repeats, train.sampler.window) == (2, 3)
    crop, _ = build_eval_loader(images, data, 6, **place).reader
    assert crop == CenterCrop(SIZE, 26, "bicubic")
    train = build_train_loader(images, data | {"crop": "simple"}, 8, 4, seed=5, **place)
    assert train.reader[0] == SimpleCrop(SIZE, False, "bicubic")


def test_workers_change_nothing_and_leave_with_the_loader(split):
    before = set(active_children())
    sampler = TrainSampler(20, 8, 4, seed=5, num_uniforms=CROP_UNIFORMS)
    here, loader = (Loader(sampler, reader(split, RandomCrop(), number)) for number in (0, 2))
    next(iter(loader))  # epoch 0, left early
    here.load_state_dict({"epoch": 1, "samples": 0})
    torch.testing.assert_close(list(loader), list(here), rtol=0, atol=0)
    assert len(set(active_children()) - before) >= 2
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
    assert (
        run_python(program, env=os.environ | {"OMP_NUM_THREADS": "2"}, timeout=60).stdout
        == "1048576.0 1048576.0\n"
    )


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


@pytest.mark.parametrize(("workers", "named"), [(0, 3), (1, 2)])
def test_bad_images_are_left_out_and_named_once_but_many_stop_the_pass(
    split, monkeypatch, capsys, workers, named
):
    ((images, labels),) = eval_loader(split)
    Image.new("L", (8, 8)).save(split.path(7), "EPS")  # runs as a PostScript program
    split.path(8).write_bytes(b"P4 20000 9999\n".ljust(1 << 25))  # the bits may follow
    split.path(9).unlink()
    split.path(9).symlink_to("nowhere")
    words = "2 of the 10 images that this process reads in a pass are bad, more than 1%"
    with pytest.raises(UserError, match=f"^{split.path(8)}: .*{words}$"):
        list(reader(split, CenterCrop(SIZE, 28), dp_size=2).read(EvalSampler(20, 4).draws(0)))
    capsys.readouterr()
    monkeypatch.setattr("common.data.bad_images.MAX_BAD_SHARE", 0.15)
    monkeypatch.setattr("common.data.bad_images.NAMED", named)
    loader = eval_loader(split, workers)
    images[list(BAD)] = 0
    labels[list(BAD)] = NO_LABEL
    for _ in range(2):
        torch.testing.assert_close(list(loader), [(images, labels)], rtol=0, atol=0)
    loader.close()
    lines = [
        f"skipped: {split.path(row)}: {reason}; remove or replace this image"
        for row, reason in BAD.items()
    ]
    assert capsys.readouterr().err.splitlines() == lines[:named]


def test_a_fingerprint_is_of_paths_labels_and_class_names(tmp_path):
    lists = [("1", 0), ("2", 1)], [("1", 1), ("2", 0)], [("1", 0), ("3", 1)]
    found = {
        FolderSplit(tmp_path, names, files).fingerprint for names in ("ab", "ac") for files in lists
    }
    assert len(found) == 6
