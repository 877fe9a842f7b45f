"""Every operation against torchvision's, an image at a time."""

import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from cifar10_benchmark import operations as ops

IMAGES = torch.randint(0, 256, (24, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
IMAGES[8:16] = (torch.linspace(40, 90, 32) + torch.linspace(0, 60, 8)[:, None, None, None]).to(torch.uint8)  # shades
IMAGES[16:] = (IMAGES[16:] < 128) * 200  # two values
IMAGES[7] = 77  # flat


def shear_y(image, slope):
    degrees = torch.tensor(slope).atan().rad2deg().item()
    return tv.affine(image, angle=0.0, translate=[0, 0], scale=1.0, shear=[0.0, degrees], center=[0, 0])


def translate(image, x, y):
    return tv.affine(image, angle=0.0, translate=[int(x * 32), int(y * 32)], scale=1.0, shear=[0.0, 0.0])


# operation: (ours, torchvision's, magnitudes)
OPERATIONS = {
    "shear_y": (ops.shear_y, shear_y, [0.21, -0.27]),
    "translate_x": (ops.translate_x, lambda image, share: translate(image, share, 0), [0.43, -0.43, 0.01]),
    "translate_y": (ops.translate_y, lambda image, share: translate(image, 0, share), [0.43, -0.43, 0.01]),
    "rotate": (ops.rotate, tv.rotate, [6.7, -6.7, 30.0]),
    "brightness": (ops.brightness, lambda image, change: tv.adjust_brightness(image, 1 + change), [0.7, -0.7, 0.0]),
    "color": (ops.color, lambda image, change: tv.adjust_saturation(image, 1 + change), [0.9, -0.9, 0.3]),
    "contrast": (ops.contrast, lambda image, change: tv.adjust_contrast(image, 1 + change), [0.7, -0.7]),
    "sharpness": (ops.sharpness, lambda image, change: tv.adjust_sharpness(image, 1 + change), [0.9, -0.9, 0.3]),
    "posterize": (ops.posterize, lambda image, bits: tv.posterize(image, int(bits)), [5.0, 8.0, 4.0]),
    "solarize": (ops.solarize, lambda image, share: tv.solarize(image, 255 * share), [0.0, 0.1, 2 / 3, 1.0]),
    "autocontrast": (ops.autocontrast, lambda image, _: tv.autocontrast(image), [0.0]),
    "equalize": (ops.equalize, lambda image, _: tv.equalize(image), [0.0]),
    "invert": (ops.invert, lambda image, _: tv.invert(image), [0.0]),
}
# where the blend of two pixels is a whole number, rounding decides whether it is cut to that or to the one below
TO_WITHIN_1 = ("color", "contrast", "sharpness")


@pytest.mark.parametrize("name", OPERATIONS)
def test_equals_torchvision(name):
    operation, reference, magnitudes = OPERATIONS[name]
    before = IMAGES.clone()
    for magnitude in magnitudes:
        result = operation(IMAGES, torch.full((len(IMAGES),), magnitude))
        assert result.dtype == torch.uint8
        expected = torch.stack([reference(image, magnitude) for image in IMAGES])
        difference = (result.int() - expected.int()).abs()
        assert difference.max() <= (name in TO_WITHIN_1), magnitude
        assert difference.float().mean() < 0.1, magnitude
    assert torch.equal(IMAGES, before)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_image_is_changed_by_its_own_magnitude(name):
    operation, _, magnitudes = OPERATIONS[name]
    both = torch.tensor([magnitudes[0], magnitudes[-1]])
    together = operation(IMAGES[:2], both)
    alone = torch.cat([operation(IMAGES[row : row + 1], both[row : row + 1]) for row in range(2)])
    assert torch.equal(together, alone)
    assert not torch.equal(operation(IMAGES, torch.full((len(IMAGES),), magnitudes[0])), IMAGES)
