"""Both policies against torchvision's, of single images and of batches."""

from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from common.data.auto_augment import AutoAugment, RandAugment

RANDOM = np.random.default_rng(0)
NOISE = RANDOM.integers(0, 256, (4, 5, 3), np.uint8)
IMAGE = Image.fromarray(NOISE).resize((31, 20), Image.Resampling.BICUBIC)


def rand_augment(magnitude: int, numbers: np.ndarray) -> Image.Image:
    """Return torchvision's result if it draws ``numbers``: in pairs, the operation and the sign."""
    pairs = iter(numbers.reshape(-1, 2))
    signs = []

    def randint(count: int, _: tuple) -> int:
        which, sign = next(pairs)
        signs.append(torch.tensor(sign))
        return int(count * which)

    theirs = v2.RandAugment(2, magnitude, num_magnitude_bins=1001, fill=128)
    with (
        mock.patch("torch.randint", randint),
        mock.patch("torch.rand", side_effect=lambda _: signs[-1]),
    ):
        return theirs(IMAGE)


def auto_augment(numbers: np.ndarray) -> Image.Image:
    """Return what torchvision's functions make of the image."""
    theirs = v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)
    image = IMAGE
    operations = theirs._policies[int(25 * numbers[0])]
    draws = numbers[1:].reshape(2, 2)
    for (name, probability, level), (applied, sign) in zip(operations, draws, strict=True):
        if applied >= probability:
            continue
        magnitudes, is_signed = theirs._AUGMENTATION_SPACE[name]
        values = magnitudes(10, image.height, image.width)
        value = 0.0 if values is None else float(values[level])
        if is_signed and sign < 0.5:
            value = -value
        image = theirs._apply_image_or_video_transform(
            image,
            name,
            value,
            theirs.interpolation,
            theirs._fill,
        )
    return image


@pytest.mark.parametrize(
    ("policy", "theirs"),
    [
        (AutoAugment(), auto_augment),
        (RandAugment(2, 0), partial(rand_augment, 0)),
        (RandAugment(2, 3), partial(rand_augment, 300)),
        (RandAugment(2, 7.77), partial(rand_augment, 777)),
        (RandAugment(2, 10), partial(rand_augment, 1000)),
    ],
)
def test_an_image_is_augmented_as_by_torchvision(policy, theirs):
    for numbers in RANDOM.random((100, policy.uniforms)):
        found = policy(IMAGE, numbers)
        expected = theirs(numbers)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "policy",
    [
        AutoAugment(),
        RandAugment(1, 0),
        RandAugment(1, 3),
        RandAugment(1, 9.5),
        RandAugment(1, 10),
    ],
)
def test_a_batch_is_augmented_as_its_images_within_rounding(policy):
    numbers = RANDOM.random((300, policy.uniforms))
    images = [
        IMAGE,
        IMAGE.crop((0, 0, 16, 20)),
        Image.new("RGB", IMAGE.size, (7, 0, 255)),
    ]
    for image in images:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        batch = pixels.repeat(300, 1, 1, 1)
        augmented = policy.augment_batch(batch, numbers).permute(0, 2, 3, 1)
        expected = np.stack([policy(image, row) for row in numbers]).astype(int)
        difference = np.abs(augmented.numpy() - expected)
        # one more for each operation whose values are rounded
        assert difference.max() <= policy.uniforms // 2
