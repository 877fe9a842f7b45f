"""RandAugment (Cubuk et al., arXiv 1909.13719) of one image, from uniform numbers, by torchvision's operations."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torchvision.transforms.v2 import functional as F

FILL = 128  # what lies outside the image is grey
LEVELS = 10

Operation = Callable[[Image.Image, float], Image.Image]


def _affine(image: Image.Image, *, shear: tuple[float, float] = (0, 0), move: tuple[float, float] = (0, 0)):
    degrees = [math.degrees(math.atan(slope)) for slope in shear]
    pixels = [int(share * size) for share, size in zip(move, image.size, strict=True)]
    center = [0, 0] if any(shear) else None
    return F.affine(image, angle=0, translate=pixels, scale=1, shear=degrees, fill=FILL, center=center)


# operation: (function, magnitude at level 0, at level 10, whether half of the time the other way round)
OPERATIONS: dict[str, tuple[Operation, float, float, bool]] = {
    "Identity": (lambda image, _: image, 0, 0, False),
    "ShearX": (lambda image, slope: _affine(image, shear=(slope, 0)), 0, 0.3, True),
    "ShearY": (lambda image, slope: _affine(image, shear=(0, slope)), 0, 0.3, True),
    "TranslateX": (lambda image, share: _affine(image, move=(share, 0)), 0, 150 / 331, True),
    "TranslateY": (lambda image, share: _affine(image, move=(0, share)), 0, 150 / 331, True),
    "Rotate": (lambda image, degrees: F.rotate(image, degrees, fill=FILL), 0, 30, True),
    "Brightness": (lambda image, change: F.adjust_brightness(image, 1 + change), 0, 0.9, True),
    "Color": (lambda image, change: F.adjust_saturation(image, 1 + change), 0, 0.9, True),
    "Contrast": (lambda image, change: F.adjust_contrast(image, 1 + change), 0, 0.9, True),
    "Sharpness": (lambda image, change: F.adjust_sharpness(image, 1 + change), 0, 0.9, True),
    "Posterize": (lambda image, bits: F.posterize(image, round(bits)), 8, 4, False),
    "Solarize": (lambda image, share: F.solarize(image, 255 * share), 1, 0, False),
    "AutoContrast": (lambda image, _: F.autocontrast(image), 0, 0, False),
    "Equalize": (lambda image, _: F.equalize(image), 0, 0, False),
}
NAMES = list(OPERATIONS)


@dataclass(frozen=True)
class RandAugment:
    """Apply ``operations`` of `OPERATIONS` one after the other, each drawn anew, all at one ``magnitude`` of 0 to 10.

    10 is the largest, as in the paper, TensorFlow and timm; torchvision counts the same range from 0 to 30.
    """

    operations: int
    magnitude: float

    @property
    def uniforms(self) -> int:
        """How many numbers in [0, 1) an image takes: which operation, and its sign, for each."""
        return 2 * self.operations

    def __call__(self, image: Image.Image, uniforms: np.ndarray) -> Image.Image:
        """Return ``image`` augmented as ``uniforms`` [`uniforms`] say."""
        for choice, sign in uniforms.reshape(-1, 2):
            function, first, last, is_signed = OPERATIONS[NAMES[int(choice * len(NAMES))]]
            strength = first + (last - first) * self.magnitude / LEVELS
            image = function(image, -strength if is_signed and sign < 0.5 else strength)
        return image
