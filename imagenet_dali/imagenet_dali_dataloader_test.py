import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as F

from common.data.crops import UNIFORMS_PER_SAMPLE, CenterCrop, RandomCrop
from common.data.loader import Loader
from common.data.record_reader import Record
from common.data.sampling import NO_LABEL, EvalSampler, TrainSampler
from common.errors import UserError
from imagenet_dali.dataset import Split, open_split
from imagenet_dali.imagenet_dali_dataloader import DaliReader
from imagenet_dali.testing import spoil_record

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 24


@pytest.fixture(scope="session")
def root(photographs: Path) -> Path:
    return photographs / "shards"


@pytest.fixture
def closing():
    loaders = []
    yield lambda loader: loaders.append(loader) or loader
    for loader in loaders:
        loader.close()


def build_reader(split: Split, crop: RandomCrop | CenterCrop, batch: int, resizes: bool = False) -> DaliReader:
    options = dict(mean=MEAN, std=STD, threads=2, device=torch.device("cpu"), resizes=resizes)
    return DaliReader(split, crop, batch=batch, size=SIZE, **options)


def train_loader(split: Split, block: int = 0, resizes: bool = False) -> Loader:
    blocks = split.block_bounds(block) if block else None
    sampler = TrainSampler(len(split), 8, 4, seed=5, uniforms=UNIFORMS_PER_SAMPLE, blocks=blocks)
    return Loader(sampler, build_reader(split, RandomCrop(), 4, resizes))


def eval_loader(split: Split, batch: int, dp_rank: int = 0, dp_size: int = 1, resizes: bool = False) -> Loader:
    blocks = split.block_bounds(2000)
    sampler = EvalSampler(len(split), batch, dp_rank=dp_rank, dp_size=dp_size, blocks=blocks)
    return Loader(sampler, build_reader(split, CenterCrop(SIZE, 28), batch, resizes))


def pixels(images: torch.Tensor) -> np.ndarray:
    """Undo the normalisation: [B, 3, H, W] to uint8 values [B, H, W, 3]."""
    return 255 * (images.permute(0, 2, 3, 1).numpy() * STD + MEAN)


def decode(split: Split, index: int) -> Image.Image:
    return Image.open(io.BytesIO(split.read(index)[0]))


@pytest.mark.parametrize("resizes", [False, True])  # as on a CPU, and in the graph for a GPU
@pytest.mark.parametrize("block", [0, 3000])
def test_training_shows_the_crops_and_labels_of_the_draws(root, closing, block, resizes):
    split = open_split(root, "train")
    loader = closing(train_loader(split, block, resizes))
    for draw, (images, labels) in zip(loader.sampler.draws(0), loader, strict=True):
        assert images.dtype == torch.float32
        assert images.is_contiguous()
        assert labels.tolist() == [split.read(index)[1] for index in draw.indices]
        records = split.records[draw.indices]
        crops = RandomCrop()(records["height"], records["width"], draw.uniforms)
        for row, index in enumerate(draw.indices):
            window = (*crops.start[row].tolist(), *crops.shape[row].tolist())
            expected = F.resized_crop(decode(split, index), *window, [SIZE, SIZE])
            expected = F.hflip(expected) if crops.flip[row] else expected
            difference = np.abs(pixels(images)[row] - np.asarray(expected, float))
            assert difference.mean() < (0.6 if resizes else 0.3)
            assert np.quantile(difference, 0.99) < (4 if resizes else 1.1)


@pytest.mark.parametrize("resizes", [False, True])  # as on a CPU, and in the graph for a GPU
@pytest.mark.parametrize("dp_size", [1, 2])
def test_evaluation_shows_each_image_once_as_torchvision_does(root, closing, dp_size, resizes):
    split = open_split(root, "validation")
    seen = 0
    for rank in range(dp_size):
        loader = closing(eval_loader(split, 4, rank, dp_size, resizes))
        for draw, (images, labels) in zip(loader.sampler.draws(0), loader, strict=True):
            samples = int((draw.indices >= 0).sum())
            seen += samples
            assert images.shape == (4, 3, SIZE, SIZE)
            assert labels[samples:].tolist() == [NO_LABEL] * (4 - samples)
            assert not images[samples:].any()
            for row, index in enumerate(draw.indices[:samples]):
                expected = F.center_crop(F.resize(decode(split, index), 28), SIZE)
                assert labels[row] == split.read(index)[1]
                assert np.abs(pixels(images)[row] - np.asarray(expected, float)).max() < 1.1
    assert seen == len(split)


@pytest.mark.parametrize("resizes", [False, True])
def test_a_rank_without_samples_gets_a_batch_of_padding(root, closing, resizes):
    loader = closing(eval_loader(open_split(root, "validation"), 8, dp_rank=2, dp_size=3, resizes=resizes))
    ((images, labels),) = list(loader)
    assert images.shape == (8, 3, SIZE, SIZE)
    assert not images.any()
    assert labels.tolist() == [NO_LABEL] * 8


@pytest.mark.parametrize("block", [0, 3000])
def test_resumes_in_the_middle_of_an_epoch_bit_for_bit(root, closing, block):
    split = open_split(root, "train")
    loader, resumed = closing(train_loader(split, block)), closing(train_loader(split, block))
    next(iter(loader))  # epoch 0, left early
    running = iter(loader)
    for _ in range(3):
        next(running)
    resumed.load_state_dict(loader.state_dict())
    expected = [*running, *loader]
    got = [*resumed, *resumed]
    assert len(got) == len(expected) == 2 * len(loader) - 3
    for (images, labels), (expected_images, expected_labels) in zip(got, expected, strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)


def test_batches_stay_as_they_are_while_others_are_read(root, closing):
    loader = closing(train_loader(open_split(root, "train")))
    held = [(images, images.clone()) for images, _ in loader]
    assert all(torch.equal(images, copy) for images, copy in held)


class Corrupt:
    """A split with one image that lost its second half, and whose checksum is right."""

    def __init__(self, split: Split, index: int) -> None:
        self.split, self.index = split, index

    def __getattr__(self, name: str) -> object:
        return getattr(self.split, name)

    def __len__(self) -> int:
        return len(self.split)

    def read_span(self, first: int, end: int) -> list[Record]:
        records = list(self.split.read_span(first, end))
        if first <= self.index < end:
            jpeg, label = records[self.index - first]
            records[self.index - first] = jpeg[: len(jpeg) // 2], label
        return records


def test_an_image_that_does_not_decode_is_named(root, closing):
    split = open_split(root, "train")
    loader = closing(train_loader(split))
    order = [draw.indices for draw in loader.sampler.draws(0)]
    index = int(order[3][2])
    loader.reader.split = loader.reader.records.source = Corrupt(split, index)
    place = f"{split.shards[0]}: record {index} of train at byte {split.records['offset'][index]}: "
    with pytest.raises(UserError) as raised:
        list(loader)
    assert str(raised.value).startswith(place)
    assert f"python -m imagenet_dali.prepare --check --repair {root}" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("block", [0, 3000])
def test_a_record_that_changed_on_disk_is_named(data, closing, block):
    split = open_split(data, "train")
    shard = spoil_record(data, "train", 4)
    with pytest.raises(UserError, match=f"{shard}: record 4 of train at byte {split.records[4]['offset']}"):
        list(closing(train_loader(split, block)))
    shard.write_bytes(b"")
    with pytest.raises(UserError, match=rf"{shard}: record \d+ of train .*: the shard is shorter than its index; run"):
        list(closing(train_loader(split, block)))


@pytest.mark.slow
def test_a_process_that_leaves_a_pass_early_ends_quietly(root):
    program = f"""
from imagenet_dali.imagenet_dali_dataloader_test import open_split, train_loader
loader = train_loader(open_split({str(root)!r}, "train"))
running = iter(loader)
next(running)
"""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[1], check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
