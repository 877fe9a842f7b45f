from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from common.data.rand_augment import FILL, RandAugment
from common.testing.host_sync import forbid_waiting

NOISE = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)
IMAGE = Image.fromarray(NOISE).resize((31, 20), Image.Resampling.BICUBIC)
NUMBERS = np.random.default_rng(1).random((60, 4))  # enough for each of the 14 operations, with both signs
ROUNDED = ("Contrast", "Color", "Sharpness", "AutoContrast")  # where the last bit of a value may differ


def torchvisions(magnitude: int, numbers: np.ndarray) -> np.ndarray:
    """Return torchvision's result where it draws ``numbers``: by pairs, one for the operation, one for the sign."""
    pairs: Iterator[np.ndarray] = iter(numbers.reshape(-1, 2))
    signs = []

    def randint(count: int, _: tuple) -> int:
        which, sign = next(pairs)
        signs.append(torch.tensor(sign))
        return int(count * which)

    with mock.patch("torch.randint", randint), mock.patch("torch.rand", side_effect=lambda _: signs[-1]):
        return np.asarray(v2.RandAugment(2, magnitude, fill=FILL)(IMAGE))


@pytest.mark.parametrize(("magnitude", "theirs"), [(0, 0), (3, 9), (7, 21), (10, 30)])
def test_it_is_torchvisions_at_three_times_the_magnitude(magnitude: int, theirs: int) -> None:
    augment, state = RandAugment(2, magnitude), torch.get_rng_state()
    for numbers in NUMBERS:
        assert np.array_equal(augment(IMAGE, numbers), torchvisions(theirs, numbers))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("magnitude", [0, 3, 9.5, 10])
def test_a_batch_is_augmented_as_each_image_within_rounding(magnitude: float) -> None:
    augment = RandAugment(1, magnitude)
    numbers = np.array([[(which + 0.5) / 14, sign] for which in range(14) for sign in (0.2, 0.8)])
    constant = Image.new("RGB", IMAGE.size, (7, 0, 255))
    names = list(augment.transform._AUGMENTATION_SPACE)
    for image in (IMAGE, constant):
        batch = torch.from_numpy(np.stack([np.asarray(image)] * 28)).permute(0, 3, 1, 2).contiguous()
        augment.augment_batch(batch.clone(), numbers)  # makes the tables of moved pixels
        with forbid_waiting(torch.device("cpu")):
            augmented = augment.augment_batch(batch, numbers)
        for row, found in enumerate(augmented.permute(0, 2, 3, 1).numpy()):
            expected = np.asarray(augment(image, numbers[row]), int)
            assert np.abs(found - expected).max() <= (names[row // 2] in ROUNDED), names[row // 2]


def test_an_image_of_a_batch_depends_on_its_own_numbers() -> None:
    augment = RandAugment(2, 10)
    batch = torch.from_numpy(np.stack([np.asarray(IMAGE)] * len(NUMBERS))).permute(0, 3, 1, 2).contiguous()
    whole = augment.augment_batch(batch.clone(), NUMBERS)
    alone = [augment.augment_batch(batch[:1].clone(), numbers[None]) for numbers in NUMBERS]
    assert torch.equal(whole, torch.cat(alone))
    assert len({image.numpy().tobytes() for image in whole}) > 40
