"""Crops against torchvision: the distribution of the random ones, the pixels of all."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as F

from common.data.crops import (
    CROP_UNIFORMS,
    CenterCrop,
    Crop,
    RandomCrop,
    SimpleCrop,
    at_size,
    crop_image,
)
from common.data.sampler import sample_uniforms


@pytest.mark.parametrize(
    ("height", "width"),
    [
        (375, 500),
        # these fall back to the central crop, often and always
        (300, 100),
        (40, 900),
        (900, 40),
    ],
)
def test_random_crops_are_those_of_torchvision(height, width, monkeypatch):
    """But for the rounding of its numbers, which are float32."""
    uniforms = np.random.default_rng(0).random((1000, CROP_UNIFORMS))
    sizes = np.full((1000, 2), (height, width))
    crops = RandomCrop()(sizes, uniforms)
    image = torch.empty(1, height, width)
    expected = []
    for row in uniforms:
        tries = row[:20].reshape(2, 10).T.ravel()  # area and aspect ratio in turn
        position = row[20:]
        monkeypatch.setattr(torch.Tensor, "uniform_", uniform_from(tries))
        monkeypatch.setattr(torch, "randint", randint_from(position))
        box = RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
        expected.append(box)
    found = np.hstack([crops.start, crops.shape])
    is_equal = (found == expected).all(1)
    assert is_equal.mean() > 0.99


def uniform_from(numbers: np.ndarray) -> Callable[..., torch.Tensor]:
    """Return a ``Tensor.uniform_`` that takes one of the numbers after the other."""
    rest = iter(numbers)

    def uniform_(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return x.fill_(low + (high - low) * next(rest))

    return uniform_


def randint_from(numbers: np.ndarray) -> Callable[..., torch.Tensor]:
    """Return a ``torch.randint`` that takes one of the numbers after the other."""
    rest = iter(numbers)

    def randint(_: int, high: int, size: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(int(next(rest) * high))

    return randint


def shown_by_torchvision(
    image: Image.Image, crop: Crop, size: int, uniforms: np.ndarray
) -> Image.Image:
    """Return what torchvision makes of ``image``, with the draws of ``uniforms`` [1, K]."""
    interpolation = F.InterpolationMode(crop.interpolation)
    if isinstance(crop, CenterCrop):
        resized = F.resize(image, crop.short_side, interpolation)
        return F.center_crop(resized, size)
    if isinstance(crop, RandomCrop):
        crops = crop(np.array([[image.height, image.width]]), uniforms)
        top, left = crops.start[0].tolist()
        height, width = crops.shape[0].tolist()
        shown = F.resized_crop(image, top, left, height, width, [size, size], interpolation)
    else:
        resized = F.resize(image, size, interpolation)
        down, right = uniforms[0, -3:-1]
        top = int(down * (resized.height + 8 - size + 1))
        left = int(right * (resized.width + 8 - size + 1))
        cut = transforms.RandomCrop(size, padding=4, padding_mode="reflect")
        cut.get_params = lambda *_: (top, left, size, size)
        shown = cut(resized)
    is_flipped = crop.flip and uniforms[0, -1] < 0.5
    return F.hflip(shown) if is_flipped else shown


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("crop", "size"),
    [
        (CenterCrop(224, 256), 224),
        (CenterCrop(17, 20), 17),
        (CenterCrop(28, 28), 28),
        (at_size(SimpleCrop(9), 32), 32),
        (SimpleCrop(5, flip=False), 5),
        (RandomCrop(), 224),
        (RandomCrop(flip=False), 5),
    ],
)
def test_a_crop_shows_what_torchvision_shows(crop, size, interpolation):
    random = np.random.default_rng(0)
    crop = replace(crop, interpolation=interpolation)
    shapes = [
        (375, 500),
        (500, 333),
        (9, 13),
        (300, 41),
        *random.integers(20, 400, (20, 2)),
    ]
    for number, (height, width) in enumerate(shapes):
        pixels = random.integers(0, 256, (height, width, 3), np.uint8)
        uniforms = sample_uniforms(seed=0, epoch=0, step=number, row=0, rows=1, count=CROP_UNIFORMS)
        shown = crop_image(pixels, crop, size, uniforms)
        image = Image.fromarray(pixels)
        expected = shown_by_torchvision(image, crop, size, uniforms)
        difference = np.abs(np.asarray(shown, int) - np.asarray(expected, int))
        assert difference.mean() < 0.5
        # Pillow rounds to 8 bits between its two passes, which matters with negative weights
        if interpolation != "bicubic":
            assert difference.max() <= 1
