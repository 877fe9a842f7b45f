"""torchvision's AutoAugment and RandAugment for images and batches, and timm's for images."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from common.data.loader import to_device

LEVELS = 10
BINS = 1000  # RandAugment's magnitudes are as fine as a hundredth of a level
MOVES = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")

Operation = tuple[str, float]  # torchvision's name and magnitude


class Policy:
    """Augment by operations of torchvision's ``transform``, as ``uniforms`` numbers in [0, 1) for each image draw them.

    A PIL image is augmented by torchvision. `augment_batch` does the same to a batch on any device, without waiting for
    a GPU: pixels are moved exactly as Pillow does, and values differ by its rounding. What lies outside the image has
    the value ``fill``.
    """

    def __init__(self, transform: v2.AutoAugment | v2.RandAugment, uniforms: int, fill: int) -> None:
        self.transform, self.uniforms, self.fill = transform, uniforms, fill
        self._operations = cache(self.build_operations)
        self._sources: dict[tuple, Tensor] = {}

    def build_operations(self, height: int, width: int) -> list[Operation]:
        """Return all operations that may be drawn for images of that size."""
        raise NotImplementedError

    def draw(self, uniforms: np.ndarray) -> np.ndarray:
        """Return what to apply to each image, one after the other: indices of operations, int [B, N]."""
        raise NotImplementedError

    def __call__(self, image: Image.Image, uniforms: np.ndarray) -> Image.Image:
        """Return ``image`` augmented by the operations that ``uniforms`` [`uniforms`] draw."""
        operations = self._operations(image.height, image.width)
        for number in self.draw(uniforms[None])[0]:
            image = self._apply(image, operations[number])
        return image

    def augment_batch(self, images: Tensor, uniforms: np.ndarray) -> Tensor:
        """Augment ``images``, uint8 [B, 3, Y, X], in place by ``uniforms`` [B, `uniforms`]; return them."""
        operations = self._operations(*images.shape[2:])
        for drawn in self.draw(uniforms).T:
            for number in np.unique(drawn):
                rows = to_device(np.flatnonzero(drawn == number), images.device)
                images[rows] = self._change(images[rows], operations[number])
        return images

    def _signed(self, name: str, level: int | None, bins: int, height: int, width: int) -> list[Operation]:
        """Return an operation with the negative and with the positive magnitude of a level, if it has one."""
        magnitudes_of, is_signed = self.transform._AUGMENTATION_SPACE[name]
        magnitudes = magnitudes_of(bins, height, width)
        magnitude = 0.0 if magnitudes is None else float(magnitudes.numpy()[level])
        return [(name, -magnitude if is_signed else magnitude), (name, magnitude)]

    def _apply(self, image: Image.Image | Tensor, operation: Operation) -> Any:
        return self.transform._apply_image_or_video_transform(
            image, *operation, self.transform.interpolation, self.transform._fill
        )

    def _change(self, images: Tensor, operation: Operation) -> Tensor:
        """Apply one operation, replacing those of torchvision that copy to the GPU and wait."""
        name, magnitude = operation
        if name in MOVES:
            source = self._source(operation, images)
            return images.flatten(2)[..., source.clamp(min=0)].masked_fill_(source < 0, self.fill).view_as(images)
        if name == "Sharpness":
            return sharpen(images, 1 + magnitude)
        return autocontrast(images) if name == "AutoContrast" else self._apply(images, operation)

    def _source(self, operation: Operation, images: Tensor) -> Tensor:
        """Return the number of the pixel that Pillow moves to each place [Y * X]; negative outside the image."""
        height, width = images.shape[2:]
        key = (operation, height, width, images.device)
        if key not in self._sources:
            first = self.fill + 1
            numbers = np.arange(height * width, dtype=np.int32).reshape(height, width) + first
            moved = np.asarray(self._apply(Image.fromarray(numbers), operation)).astype(np.int64)
            self._sources[key] = to_device(moved.ravel() - first, images.device)
        return self._sources[key]


class RandAugment(Policy):
    """``operations`` of torchvision's 14, drawn independently, at one ``magnitude`` of 0 to 10 (arXiv 1909.13719).

    10 is the largest, as in the paper, TensorFlow and timm; torchvision counts the same range from 0 to 30.
    """

    def __init__(self, operations: int, magnitude: float) -> None:
        grey = 128
        super().__init__(v2.RandAugment(fill=grey), 2 * operations, grey)
        self.level = round(magnitude / LEVELS * BINS)
        self.names = list(self.transform._AUGMENTATION_SPACE)

    def build_operations(self, height: int, width: int) -> list[Operation]:
        return [each for name in self.names for each in self._signed(name, self.level, BINS + 1, height, width)]

    def draw(self, uniforms: np.ndarray) -> np.ndarray:
        which, sign = uniforms.reshape(len(uniforms), -1, 2).transpose(2, 0, 1)
        return 2 * (len(self.names) * which).astype(int) + (2 * sign).astype(int)


class AutoAugment(Policy):
    """One of the 25 pairs of operations of AutoAugment's policy for CIFAR-10 (arXiv 1805.09501, table 7)."""

    UNIFORMS = 5  # the pair; then for each of its operations whether it is applied, and its sign

    def __init__(self) -> None:
        transform = v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)
        super().__init__(transform, self.UNIFORMS, fill=0)
        self.pairs = transform._policies
        self.probabilities = np.array([[probability for _, probability, _ in pair] for pair in self.pairs])

    def build_operations(self, height: int, width: int) -> list[Operation]:
        operations = [operation for pair in self.pairs for operation in pair]
        signed = (self._signed(name, level, LEVELS, height, width) for name, _, level in operations)
        return [*(each for both in signed for each in both), ("Identity", 0.0)]

    def draw(self, uniforms: np.ndarray) -> np.ndarray:
        pair = (len(self.pairs) * uniforms[:, 0]).astype(int)
        applied, sign = uniforms[:, 1:].reshape(-1, 2, 2).transpose(2, 0, 1)
        drawn = 4 * pair[:, None] + [0, 2] + (2 * sign).astype(int)
        return np.where(applied < self.probabilities[pair], drawn, 4 * len(self.pairs))


class TimmRandAugment:
    """timm's RandAugment, as ``text`` describes it; all its random numbers come from one of the image's own."""

    uniforms = 1

    def __init__(self, text: str, image_size: int, mean: Sequence[float], interpolation: str) -> None:
        from timm.data.auto_augment import posterize, rand_augment_transform  # a second to import
        from timm.data.transforms import str_to_pil_interp

        filled = dict(translate_const=int(0.45 * image_size), img_mean=tuple(round(255 * value) for value in mean))
        self.transform = rand_augment_transform(text, filled | {"interpolation": str_to_pil_interp(interpolation)})
        for operation in self.transform.ops:
            if operation.aug_fn is posterize:
                operation.aug_fn = _posterize

    def __call__(self, image: Image.Image, uniforms: np.ndarray) -> Image.Image:
        """Return ``image`` augmented; the states of `random` and NumPy's generator stay as they were."""
        states, number = (random.getstate(), np.random.get_state()), int(2**32 * uniforms[0])
        random.seed(number)
        np.random.seed(number)
        try:
            return self.transform(image)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep ``bits`` of each value, as timm does; magnitude 10 keeps none, which Pillow 13 refuses."""
    return ImageOps.posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)


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
