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
TABLES = (
    "Brightness",
    "Posterize",
    "Solarize",
    "Invert",
)  # the new value depends on the old one alone
# A batch is sorted by these, so that images of the same kind are a slice of it
KINDS = (
    MOVES,
    TABLES,
    ("AutoContrast",),
    ("Equalize",),
    ("Color",),
    ("Contrast",),
    ("Sharpness",),
    ("Identity",),
)

Operation = tuple[str, float]  # torchvision's name and magnitude


class Policy:
    """Augment by operations of torchvision's ``transform``, as ``uniforms`` numbers in [0, 1) for
    each image draw them.

    A PIL image is augmented by torchvision. `augment_batch` does the same to a batch on any device,
    without waiting for a GPU: pixels are moved exactly as Pillow does, and values differ by its
    rounding. What lies outside the image has the value ``fill``.
    """

    def __init__(
        self, transform: v2.AutoAugment | v2.RandAugment, uniforms: int, fill: int
    ) -> None:
        self.transform, self.uniforms, self.fill = transform, uniforms, fill
        self._operations = cache(self.build_operations)
        self._tables = cache(self._build_tables)

    def build_operations(self, height: int, width: int) -> list[Operation]:
        """Return all operations that may be drawn for images of that size."""
        raise NotImplementedError

    def draw(self, uniforms: np.ndarray) -> np.ndarray:
        """Return what to apply to each image, one after the other: indices of operations, int [B,
        N].
        """
        raise NotImplementedError

    def __call__(self, image: Image.Image, uniforms: np.ndarray) -> Image.Image:
        """Return ``image`` augmented by the operations that ``uniforms`` [`uniforms`] draw."""
        operations = self._operations(image.height, image.width)
        for number in self.draw(uniforms[None])[0]:
            image = self._apply(image, operations[number])
        return image

    def augment_batch(self, images: Tensor, uniforms: np.ndarray) -> Tensor:
        """Augment ``images``, uint8 [B, 3, Y, X], in place by ``uniforms`` [B, `uniforms`]; return
        them.
        """
        kinds, sources, tables, factors = self._tables(*images.shape[2:], images.device)
        for drawn in self.draw(uniforms).T:
            order = np.argsort(kinds[drawn], kind="stable")
            place, numbers = to_device(np.stack([order, drawn[order]]), images.device)
            counts = np.bincount(kinds[drawn], minlength=len(KINDS)).tolist()
            sizes = [counts[0], sum(counts[1:4]), sum(counts[4:7]), counts[7]]
            ordered = images[place]
            (moved, mapped, blended, _), chosen = ordered.split(sizes), numbers.split(sizes)
            move(moved, sources[chosen[0]], self.fill)
            map_values(mapped, tables[chosen[1][: counts[1]]], counts[1:4])
            blend(blended, factors[chosen[2]], counts[4:7])
            images[place] = ordered
        return images

    def _signed(
        self, name: str, level: int | None, bins: int, height: int, width: int
    ) -> list[Operation]:
        """Return an operation with the negative and with the positive magnitude of a level, if it
        has one.
        """
        magnitudes_of, is_signed = self.transform._AUGMENTATION_SPACE[name]
        magnitudes = magnitudes_of(bins, height, width)
        magnitude = 0.0 if magnitudes is None else float(magnitudes.numpy()[level])
        return [(name, -magnitude if is_signed else magnitude), (name, magnitude)]

    def _apply(self, image: Image.Image, operation: Operation) -> Any:
        return self.transform._apply_image_or_video_transform(
            image, *operation, self.transform.interpolation, self.transform._fill
        )

    def _build_tables(
        self, height: int, width: int, device: torch.device
    ) -> tuple[np.ndarray, Tensor, Tensor, Tensor]:
        """Return for each of N operations: its kind, int [N]; the number of the pixel that it moves
        to each place, int [N, Y * X], which is Y * X outside the image; each value's new value,
        uint8 [N, 256]; its factor [N, 1, 1, 1].
        """
        operations, first = self._operations(height, width), self.fill + 1

        def results(image: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
            new = (
                self._apply(Image.fromarray(image), each) if each[0] in names else image
                for each in operations
            )
            return np.stack([np.asarray(each).ravel() for each in new])

        pixels = np.arange(height * width, dtype=np.int32).reshape(height, width) + first
        sources = results(pixels, MOVES).astype(np.int64) - first
        sources[sources < 0] = height * width
        tables = results(np.arange(256, dtype=np.uint8)[None], TABLES)
        factors = np.array([1 + magnitude for _, magnitude in operations], np.float32)[
            :, None, None, None
        ]
        kinds = np.array(
            [next(i for i, names in enumerate(KINDS) if name in names) for name, _ in operations]
        )
        return (
            kinds,
            to_device(sources, device),
            to_device(tables, device),
            to_device(factors, device),
        )


class RandAugment(Policy):
    """``operations`` of torchvision's 14, drawn independently, at one ``magnitude`` of 0 to 10
    (arXiv 1909.13719).

    10 is the largest, as in the paper, TensorFlow and timm; torchvision counts the same range from
    0 to 30.
    """

    def __init__(self, operations: int, magnitude: float) -> None:
        grey = 128
        super().__init__(v2.RandAugment(fill=grey), 2 * operations, grey)
        self.level = round(magnitude / LEVELS * BINS)
        self.names = list(self.transform._AUGMENTATION_SPACE)

    def build_operations(self, height: int, width: int) -> list[Operation]:
        return [
            each
            for name in self.names
            for each in self._signed(name, self.level, BINS + 1, height, width)
        ]

    def draw(self, uniforms: np.ndarray) -> np.ndarray:
        which, sign = uniforms.reshape(len(uniforms), -1, 2).transpose(2, 0, 1)
        return 2 * (len(self.names) * which).astype(int) + (2 * sign).astype(int)


class AutoAugment(Policy):
    """One of the 25 pairs of operations of AutoAugment's policy for CIFAR-10 (arXiv 1805.09501,
    table 7).
    """

    UNIFORMS = 5  # the pair; then for each of its operations whether it is applied, and its sign

    def __init__(self) -> None:
        transform = v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)
        super().__init__(transform, self.UNIFORMS, fill=0)
        self.pairs = transform._policies
        self.probabilities = np.array(
            [[probability for _, probability, _ in pair] for pair in self.pairs]
        )

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
    """timm's RandAugment, as ``text`` describes it; all its random numbers come from one of the
    image's own.
    """

    uniforms = 1

    def __init__(self, text: str, mean: Sequence[float], interpolation: str) -> None:
        from timm.data.auto_augment import posterize, rand_augment_transform  # a second to import
        from timm.data.transforms import str_to_pil_interp

        options = dict(img_mean=tuple(round(255 * value) for value in mean))
        self.transform = rand_augment_transform(
            text, options | {"interpolation": str_to_pil_interp(interpolation)}
        )
        for operation in self.transform.ops:
            if operation.aug_fn is posterize:
                operation.aug_fn = _posterize

    def __call__(self, image: Image.Image, uniforms: np.ndarray) -> Image.Image:
        """Return ``image`` augmented; with DATA.workers=0 this seeds `random` and NumPy's generator
        of the process.
        """
        number = int(2**32 * uniforms[0])
        random.seed(number)
        np.random.seed(number)
        return self.transform(image)


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep ``bits`` of each value, as timm does; magnitude 10 keeps none, which Pillow 13
    refuses.
    """
    return ImageOps.posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)


def move(images: Tensor, sources: Tensor, fill: int) -> None:
    """Replace each pixel of ``images`` by that of number ``sources`` [B, Y * X]; the one after the
    last is ``fill``.
    """
    pixels = F.pad(images.flatten(2), (0, 1), value=fill)
    images.copy_(pixels.gather(2, sources[:, None].expand(-1, 3, -1)).view_as(images))


def map_values(images: Tensor, tables: Tensor, counts: list[int]) -> None:
    """Replace values by ``tables`` [counts[0], 256], then stretch ``counts[1]`` images and equalize
    ``counts[2]``.
    """
    values = images.flatten(2).long()
    equalized = values[counts[0] + counts[1] :]
    low, high = torch.aminmax(values[counts[0] :], dim=2, keepdim=True)
    levels = torch.arange(256, device=images.device)
    # AutoContrast: from the lowest and highest value of a channel to 0 and 255, unless they are the
    # same
    (low, _), (high, highest) = (bound.split(counts[1:]) for bound in (low, high))
    stretch = torch.where(high > low, (levels - low) * (255 / (high - low)), levels)
    # Equalize, as Pillow counts: below each value, in steps of a 255th of all pixels that are not
    # of the highest value
    ones = torch.ones((), dtype=torch.long, device=images.device).expand_as(equalized)
    histogram = torch.zeros(*equalized.shape[:2], 256, dtype=torch.long, device=images.device)
    histogram.scatter_add_(2, equalized, ones)
    step = (equalized.shape[2] - histogram.gather(2, highest)) // 255
    below = histogram.cumsum(2) - histogram
    equalize = torch.where(step > 0, (below + step // 2) // step.clamp(min=1), levels).clamp_(
        max=255
    )
    all_tables = [
        tables[:, None].expand(-1, 3, -1),
        stretch.to(torch.uint8),
        equalize.to(torch.uint8),
    ]
    images.copy_(torch.cat(all_tables).gather(2, values).view_as(images))


def blend(images: Tensor, factors: Tensor, counts: list[int]) -> None:
    """Extrapolate from ``counts[0]`` images without colour, ``counts[1]`` of their mean,
    ``counts[2]`` blurred.
    """
    pixels = images.float()
    start = pixels.clone()
    _, constant, blurred = start.split(counts)
    colored = pixels[: counts[0] + counts[1]]
    red, green, blue = colored.unbind(1)
    grey = (0.299 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114).round_()[:, None]
    start[: len(colored)] = grey
    constant.copy_(grey[counts[0] :].mean((2, 3), keepdim=True).round_())
    inner = blurred[..., 1:-1, 1:-1]
    inner.copy_(
        (9 * F.avg_pool2d(blurred, 3, 1)).add_(inner, alpha=4).div_(13).round_()
    )  # Pillow's weights
    images.copy_(torch.lerp(start, pixels, factors).clamp_(0, 255))
