import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms import functional as F

from common.augment import UNIFORMS_PER_SAMPLE, CenterCrop, RandomCrop
from common.errors import UserError
from common.image_folder import FolderSplit, list_files
from common.loader import Loader
from common.sampling import NO_LABEL, EvalSampler, TrainSampler
from common.torchvision_dataloader import TorchvisionReader

# Python 3.12 warns of every fork beside threads, which is how torch starts its workers there
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 24
ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two classes of images of many kinds, two splits; every third one has to be turned."""
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 5)):
        for name in ("ape", "bee"):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                height, width = random.integers(25, 60, 2).tolist()
                image = Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
                kind, mode = [("jpg", "RGB"), ("png", "RGBA"), ("png", "P"), ("jpg", "L")][number % 4]
                exif = Image.Exif()
                exif[ORIENTATION] = 6 if number % 3 == 0 else 1
                image.convert(mode).save(root / split / name / f"{number}.{kind}", exif=exif)
    return root


@pytest.fixture
def closing():
    loaders = []
    yield lambda loader: loaders.append(loader) or loader
    for loader in loaders:
        loader.close()


def open_folder(root: Path, split: str) -> FolderSplit:
    class_names, folder = ["ape", "bee"], root / ("val" if split == "validation" else split)
    files = [(path.relative_to(root).as_posix(), class_names.index(path.parent.name)) for path in list_files(folder)]
    return FolderSplit(root, class_names, files)


def reader(split, crop, workers: int = 0) -> TorchvisionReader:
    return TorchvisionReader(split, crop, size=SIZE, mean=MEAN, std=STD, workers=workers, device=torch.device("cpu"))


def train_loader(split, workers: int = 0) -> Loader:
    sampler = TrainSampler(len(split), 8, 4, seed=5, uniforms=UNIFORMS_PER_SAMPLE)
    return Loader(sampler, reader(split, RandomCrop(), workers))


def eval_loader(split, batch: int = 4) -> Loader:
    return Loader(EvalSampler(len(split), batch), reader(split, CenterCrop(SIZE, 28)))


def normalise(image: Image.Image) -> torch.Tensor:
    return F.normalize(F.to_tensor(image), MEAN, STD)


def open_upright(split: FolderSplit, index: int) -> Image.Image:
    with Image.open(split.path(index)) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def test_training_shows_what_torchvision_shows(folder, closing):
    split = open_folder(folder, "train")
    loader = closing(train_loader(split))
    flips = 0
    for draw, (images, labels) in zip(loader.sampler.draws(0), loader, strict=True):
        assert images.dtype == torch.float32
        assert images.is_contiguous()
        for row, index in enumerate(draw.indices):
            image = open_upright(split, index)
            crops = RandomCrop()(np.array([image.height]), np.array([image.width]), draw.uniforms[[row]])
            expected = F.resized_crop(image, *crops.start[0].tolist(), *crops.shape[0].tolist(), [SIZE, SIZE])
            expected = F.hflip(expected) if crops.flip[0] else expected
            flips += crops.flip[0]
            torch.testing.assert_close(images[row], normalise(expected))
            assert ["ape", "bee"][labels[row]] == split.path(index).parent.name
    assert 0 < flips < 16


def test_evaluation_shows_what_torchvision_shows_once_each(folder, closing):
    split = open_folder(folder, "validation")
    images, labels = (torch.cat(parts) for parts in zip(*closing(eval_loader(split)), strict=True))
    assert labels.tolist() == [0] * 5 + [1] * 5 + [NO_LABEL] * 2
    assert not images[10:].any()
    for index in range(10):
        expected = F.center_crop(F.resize(open_upright(split, index), 28), SIZE)
        # a value of 255 rounded the other way
        torch.testing.assert_close(images[index], normalise(expected), rtol=0, atol=1.01 / 255 / min(STD))


def test_workers_change_nothing_and_leave_with_the_loader(folder, closing):
    split = open_folder(folder, "train")
    before = set(children())
    here, workers = closing(train_loader(split)), train_loader(split, workers=2)
    for loader in (here, workers):
        next(iter(loader))  # epoch 0, left early
    for _ in range(2):
        for (images, labels), (expected_images, expected_labels) in zip(workers, here, strict=True):
            assert torch.equal(images, expected_images)
            assert torch.equal(labels, expected_labels)
    assert len(set(children()) - before) >= 2
    workers.close()
    assert set(children()) <= before


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


@pytest.mark.parametrize("workers", [0, 1])
def test_resumes_in_the_middle_of_an_epoch_bit_for_bit(folder, closing, workers):
    split = open_folder(folder, "train")
    loader, resumed = closing(train_loader(split)), closing(train_loader(split, workers))
    running = iter(loader)
    next(running)
    resumed.load_state_dict(loader.state_dict())
    for (images, labels), (expected_images, expected_labels) in zip(
        [*resumed, *resumed], [*running, *loader], strict=True
    ):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)


def test_reading_leaves_the_models_random_numbers_alone(folder, closing):
    loader = closing(train_loader(open_folder(folder, "train")))
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("content", [b"", b"no image", None])
def test_a_bad_image_is_named_in_one_line(folder, closing, monkeypatch, workers, content):
    split = open_folder(folder, "train")
    index = 7
    whole = split.path(index).read_bytes()
    data = whole[: len(whole) // 2] if content is None else content
    monkeypatch.setattr(FolderSplit, "read", lambda self, i: (data if i == index else self.path(i).read_bytes(), 0))
    with pytest.raises(UserError) as raised:
        list(closing(Loader(EvalSampler(len(split), 4), reader(split, CenterCrop(SIZE, 28), workers))))
    assert str(raised.value).startswith(f"{split.path(index)}: ")
    assert "\n" not in str(raised.value)


def test_a_file_that_vanished_is_named(folder, closing):
    split = open_folder(folder, "train")
    split.root = folder / "elsewhere"
    with pytest.raises(UserError, match="0.jpg: No such file or directory; the folder changed"):
        list(closing(eval_loader(split)))
