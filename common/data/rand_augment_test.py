import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from common.data.rand_augment import FILL, NAMES, RandAugment

TORCHVISION = v2.RandAugment(fill=FILL)
NOISE = np.random.default_rng(0).integers(0, 256, (20, 31, 3), np.uint8)
IMAGES = {
    "noise": Image.fromarray(NOISE),
    "smooth": Image.fromarray(NOISE[:4, :5]).resize((31, 20), Image.Resampling.BICUBIC),
}


def uniforms(*draws: tuple[str, float]) -> np.ndarray:
    return np.array([number for name, sign in draws for number in ((NAMES.index(name) + 0.5) / len(NAMES), sign)])


def torchvisions(image: Image.Image, name: str, magnitude: int, negative: bool) -> Image.Image:
    """Apply what torchvision draws when it draws that operation, magnitude (0 to 30) and sign."""
    magnitudes, is_signed = TORCHVISION._AUGMENTATION_SPACE[name]
    values = magnitudes(31, image.height, image.width)
    value = 0.0 if values is None else float(values[magnitude])
    value = -value if is_signed and negative else value
    return TORCHVISION._apply_image_or_video_transform(
        image, name, value, interpolation=TORCHVISION.interpolation, fill=TORCHVISION._fill
    )


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("magnitude", [0, 3, 7, 10])
@pytest.mark.parametrize("name", NAMES)
def test_every_operation_is_torchvisions(name, magnitude, kind):
    image = IMAGES[kind]
    for sign in (0.2, 0.7):
        ours = RandAugment(1, magnitude)(image, uniforms((name, sign)))
        assert np.array_equal(ours, torchvisions(image, name, 3 * magnitude, negative=sign < 0.5)), sign


def test_the_operations_are_torchvisions_and_each_is_drawn_equally_often():
    assert list(TORCHVISION._AUGMENTATION_SPACE) == NAMES
    drawn = (np.arange(2800) / 2800 * len(NAMES)).astype(int)
    assert np.bincount(drawn).tolist() == [200] * 14


def test_operations_follow_one_another():
    image = IMAGES["smooth"]
    both = RandAugment(2, 10)(image, uniforms(("Rotate", 0.9), ("Solarize", 0.1)))
    one_by_one = torchvisions(torchvisions(image, "Rotate", 30, negative=False), "Solarize", 30, negative=False)
    assert np.array_equal(both, one_by_one)
    assert RandAugment(2, 10).uniforms == 4
    assert (np.array(RandAugment(1, 10)(image, uniforms(("Rotate", 0.9))))[0, 0] == FILL).all()


def test_neither_torchs_nor_numpys_random_numbers_are_drawn():
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    for name in NAMES:
        RandAugment(1, 10)(IMAGES["noise"], uniforms((name, 0.3)))
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()
