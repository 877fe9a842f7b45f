"""torchvision's RandAugment (Cubuk et al., arXiv 1909.13719) with random numbers of each sample's own."""

from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

FILL = 128  # what lies outside the image is grey
LEVELS = 10
BINS = 1000  # the magnitudes are as fine as a hundredth of a level
MOVES = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")

Operation = tuple[str, float]  # torchvision's name and magnitude


class RandAugment:
    """Apply ``operations`` of torchvision's 14 in a row, each drawn independently, all at one ``magnitude`` of 0 to 10.

    10 is the largest, as in the paper, TensorFlow and timm; torchvision counts the same range from 0 to 30.

    A PIL image is augmented by torchvision. `augment_batch` does the same to a batch on any device, without waiting for
    a GPU: pixels are moved exactly as Pillow does, and values differ by its rounding.
    """

    def __init__(self, operations: int, magnitude: float) -> None:
        self.uniforms = 2 * operations  # how many numbers in [0, 1) an image takes
        self.level = round(magnitude / LEVELS * BINS)
        self.transform = v2.RandAugment(fill=FILL)
        self._choices = cache(self._build_choices)
        self._sources: dict[tuple, Tensor] = {}

    def __call__(self, image: Image.Image, uniforms: np.ndarray) -> Image.Image:
        """Return ``image`` augmented by the operations that ``uniforms`` [`uniforms`] draw."""
        choices = self._choices(image.height, image.width)
        for operation in _draw(choices, uniforms):
            image = self._apply(image, operation)
        return image

    def augment_batch(self, images: Tensor, uniforms: np.ndarray) -> Tensor:
        """Augment ``images``, uint8 [B, 3, Y, X], in place by ``uniforms`` [B, `uniforms`]; return them."""
        choices = self._choices(*images.shape[2:])
        for drawn in zip(*(_draw(choices, row) for row in uniforms), strict=True):
            rows_of = defaultdict(list)
            for row, operation in enumerate(drawn):
                rows_of[operation].append(row)
            for operation, rows in rows_of.items():
                place = torch.tensor(rows).to(images.device, non_blocking=True)
                images[place] = self._change(images[place], operation)
        return images

    def _build_choices(self, height: int, width: int) -> list[tuple[Operation, Operation]]:
        """Return every operation with both signs of its magnitude, if it has one."""
        choices = []
        for name, (magnitudes_of, is_signed) in self.transform._AUGMENTATION_SPACE.items():
            magnitudes = magnitudes_of(BINS + 1, height, width)
            magnitude = 0.0 if magnitudes is None else float(magnitudes[self.level])
            choices.append(((name, -magnitude if is_signed else magnitude), (name, magnitude)))
        return choices

    def _apply(self, image: Image.Image | Tensor, operation: Operation) -> Any:
        return self.transform._apply_image_or_video_transform(
            image, *operation, self.transform.interpolation, self.transform._fill
        )

    def _change(self, images: Tensor, operation: Operation) -> Tensor:
        """Apply one operation, replacing those of torchvision that copy to the GPU and wait."""
        name, magnitude = operation
        if name in MOVES:
            source = self._source(operation, images)
            return images.flatten(2)[..., source.clamp(min=0)].masked_fill_(source < 0, FILL).view_as(images)
        if name == "Sharpness":
            return sharpen(images, 1 + magnitude)
        return autocontrast(images) if name == "AutoContrast" else self._apply(images, operation)

    def _source(self, operation: Operation, images: Tensor) -> Tensor:
        """Return the number of the pixel that Pillow moves to each place [Y * X]; negative outside the image."""
        height, width = images.shape[2:]
        key = (operation, height, width, images.device)
        if key not in self._sources:
            numbers = np.arange(height * width, dtype=np.int32).reshape(height, width) + FILL + 1
            moved = np.asarray(self._apply(Image.fromarray(numbers), operation)).astype(np.int64)
            self._sources[key] = torch.from_numpy(moved.ravel() - FILL - 1).to(images.device)
        return self._sources[key]


def _draw(choices: list[tuple[Operation, Operation]], uniforms: np.ndarray) -> list[Operation]:
    pairs = uniforms.reshape(-1, 2)
    return [choices[int(len(choices) * which)][int(2 * sign)] for which, sign in pairs]


def sharpen(images: Tensor, factor: float) -> Tensor:
    """Return uint8 images sharpened as by Pillow: the difference from a 3 x 3 blur times ``factor``; edges stay."""
    pixels = images.float()
    inner = pixels[..., 1:-1, 1:-1]
    blurred = ((9 * F.avg_pool2d(pixels, 3, 1) + 4 * inner) / 13).round_()
    inner.copy_(torch.lerp(blurred, inner, factor))
    return pixels.clamp_(0, 255).to(torch.uint8)


def autocontrast(images: Tensor) -> Tensor:
    """Return uint8 images [B, 3, Y, X] with each channel stretched to 0 to 255, unless it is constant."""
    low, high = (bound.float() for bound in torch.aminmax(images.flatten(2), dim=2, keepdim=True))
    stretched = (images.flatten(2) - low) * (255 / (high - low).clamp(min=1))
    return torch.where(high > low, stretched.to(torch.uint8), images.flatten(2)).view_as(images)
