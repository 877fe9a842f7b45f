import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from common.data.rand_augment import FILL, RandAugment

NOISE = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)
IMAGE = Image.fromarray(NOISE).resize((31, 20), Image.Resampling.BICUBIC)
NUMBERS = np.random.default_rng(1).random((40, 1))  # enough for each of the 14 operations


@pytest.mark.parametrize(("magnitude", "torchvisions"), [(0, 0), (3, 9), (7, 21), (10, 30)])
def test_it_is_torchvisions_at_three_times_the_magnitude(magnitude: int, torchvisions: int) -> None:
    theirs = v2.RandAugment(2, torchvisions, fill=FILL)
    for number in NUMBERS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(number[0] * 2**53))
            expected = theirs(IMAGE)
        assert np.array_equal(RandAugment(2, magnitude)(IMAGE, number), expected)


def test_an_image_depends_on_its_number_alone() -> None:
    augment = RandAugment(2, 9.5)
    once = [np.asarray(augment(IMAGE, number)) for number in NUMBERS]
    torch.rand(7)
    again = [np.asarray(augment(IMAGE, number)) for number in reversed(NUMBERS)]
    assert all(map(np.array_equal, once, reversed(again)))
    assert len({image.tobytes() for image in once}) > 30


def test_torchs_random_numbers_are_left_alone() -> None:
    state = torch.get_rng_state()
    RandAugment(2, 10)(IMAGE, NUMBERS[0])
    assert torch.equal(state, torch.get_rng_state())
