"""3-Augment's operations against DeiT's definitions, which are Pillow's and torchvision's."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torchvision.transforms import functional as F

from common.data.color_augment import UNIFORMS_PER_SAMPLE, ColorAugment

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SMALL = np.random.default_rng(0).integers(0, 256, (5, 6, 3), np.uint8)
IMAGE = Image.fromarray(SMALL).resize((40, 30), Image.Resampling.BICUBIC)


def augmented(
    uniforms: list[float], three_augment: bool = True, jitter: float = 0.0, image: Image.Image = IMAGE
) -> np.ndarray:
    images = F.normalize(F.to_tensor(image), MEAN, STD)[None].clone()
    ColorAugment(three_augment, jitter, MEAN, STD)(images, np.array([uniforms]))
    return (255 * (images[0].permute(1, 2, 0) * torch.tensor(STD) + torch.tensor(MEAN))).numpy()


@pytest.mark.parametrize(
    ("uniforms", "expected", "most", "mean"),
    [
        ([0.1, 0.0], ImageOps.grayscale(IMAGE).convert("RGB"), 1.01, 0.05),
        ([0.5, 0.0], ImageOps.solarize(IMAGE), 0.01, 0.01),
        ([0.9, 0.0], IMAGE.filter(ImageFilter.GaussianBlur(0.1)), 1.01, 0.05),
        ([0.9, 0.5], IMAGE.filter(ImageFilter.GaussianBlur(1.05)), 4, 0.8),
        ([0.9, 1.0], IMAGE.filter(ImageFilter.GaussianBlur(2.0)), 4, 0.8),
    ],
)
def test_each_operation_is_deits(uniforms: list[float], expected: Image.Image, most: float, mean: float) -> None:
    difference = np.abs(augmented([*uniforms, 0.5, 0.5, 0.5]) - np.asarray(expected, float))
    assert difference.max() <= most
    assert difference.mean() <= mean


def test_jitter_is_torchvisions_in_any_order() -> None:
    """Within a level for each of the three roundings, of an image in which nothing is clipped."""
    factors, soft = dict(brightness=0.9, contrast=0.8, saturation=1.2), IMAGE.point(lambda value: 70 + 0.4 * value)
    found = augmented([0, 0, 1 / 3, 1 / 6, 5 / 6], three_augment=False, jitter=0.3, image=soft)
    for order in (list(factors), list(factors)[::-1]):
        expected = soft
        for name in order:
            expected = getattr(F, f"adjust_{name}")(expected, factors[name])
        assert np.abs(found - np.asarray(expected, float)).max() <= 3


def test_each_operation_is_for_a_third_of_the_images_whatever_the_others_are() -> None:
    uniforms = np.random.default_rng(1).random((300, UNIFORMS_PER_SAMPLE))
    counts = np.bincount(np.floor(3 * uniforms[:, 0]).astype(int))
    assert counts.min() > 70
    augment = ColorAugment(True, 0.3, MEAN, STD)

    def run(rows: slice) -> Tensor:
        images = torch.randn(300, 3, 9, 7, generator=torch.Generator().manual_seed(0))[rows].clone()
        augment(images, uniforms[rows])
        return images

    torch.testing.assert_close(torch.cat([run(slice(0, 100)), run(slice(100, 300))]), run(slice(None)))
