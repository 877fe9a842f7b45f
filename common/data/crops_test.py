"""Crops against torchvision: the distribution of the random ones, the pixels of all."""

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


# the last three fall back to the central crop, often and always
@pytest.mark.parametrize(("height", "width"), [(375, 500), (300, 100), (40, 900), (900, 40)])
def test_random_crops_are_those_of_torchvision(height, width, monkeypatch):
    """But for the rounding of its numbers, which are float32."""
    uniforms = np.random.default_rng(0).random((1000, CROP_UNIFORMS))
    crops = RandomCrop()(np.full((1000, 2), (height, width)), uniforms)
    image = torch.empty(1, height, width)
    expected = []
    for row in uniforms:
        tries = iter(row[:20].reshape(2, 10).T.ravel())  # area and aspect ratio in turn
        position = iter(row[20:])
        monkeypatch.setattr(
            torch.Tensor, "uniform_", lambda x, a, b, u=tries: x.fill_(a + (b - a) * next(u))
        )
        monkeypatch.setattr(
            torch, "randint", lambda _, most, size, u=position: torch.tensor(int(next(u) * most))
        )
        expected.append(RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3)))
    found = np.hstack([crops.start, crops.shape])
    assert (found == expected).all(1).mean() > 0.99


def shown_by_torchvision(
    image: Image.Image, crop: Crop, size: int, uniforms: np.ndarray
) -> Image.Image:
    """Return what torchvision makes of ``image``, with the draws of ``uniforms`` [1, K]."""
    interpolation = F.InterpolationMode(crop.interpolation)
    if isinstance(crop, CenterCrop):
        return F.center_crop(F.resize(image, crop.short_side, interpolation), size)
    if isinstance(crop, RandomCrop):
        crops = crop(np.array([[image.height, image.width]]), uniforms)
        shown = F.resized_crop(
            image, *crops.start[0].tolist(), *crops.shape[0].tolist(), [size, size], interpolation
        )
    else:
        resized = F.resize(image, size, interpolation)
        spaces = [resized.height + 8 - size, resized.width + 8 - size]
        start = (uniforms[0, -3:-1] * (np.array(spaces) + 1)).astype(int).tolist()
        cut = transforms.RandomCrop(size, padding=4, padding_mode="reflect")
        cut.get_params = lambda *_: (*start, size, size)
        shown = cut(resized)
    return F.hflip(shown) if crop.flip and uniforms[0, -1] < 0.5 else shown


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
    shapes = [(375, 500), (500, 333), (9, 13), (300, 41), *random.integers(20, 400, (20, 2))]
    for number, (height, width) in enumerate(shapes):
        pixels = random.integers(0, 256, (height, width, 3), np.uint8)
        uniforms = sample_uniforms(seed=0, epoch=0, step=number, row=0, rows=1, count=CROP_UNIFORMS)
        shown = crop_image(pixels, crop, size, uniforms)
        expected = shown_by_torchvision(Image.fromarray(pixels), crop, size, uniforms)
        difference = np.abs(np.asarray(shown, int) - np.asarray(expected, int))
        # Pillow rounds to 8 bits between its two passes, which matters with negative weights
        assert difference.mean() < 0.5
        assert difference.max() <= 1 or interpolation == "bicubic"
