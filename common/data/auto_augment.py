"""torchvision's AutoAugment and RandAugment for images and batches, and timm's for images."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import equalize_image

from common.data.colors import luma
from common.data.loader import to_device

LEVELS = 10
BINS = 1000  # RandAugment's magnitudes are as fine as a hundredth of a level
Operation = tuple[str, float]  # torchvision's name and magnitude


@dataclass(frozen=True)
class OperationTables:
    """What each of N operations does to images of one size [Y, X]."""

    types: Tensor  # int64 [N], an index of TYPES, or IDENTITY
    sources: Tensor  # int64 [N, Y * X], the pixel moved to each position; Y * X is outside
    values: Tensor  # uint8 [N, 256], the new value of each old one
    factors: Tensor  # float32 [N, 1, 1, 1], of Color, Contrast and Sharpness
    fill: int  # the value of what lies outside


@dataclass(eq=False)
class Policy:
    """Augment by operations of torchvision's ``transform``.

    Each image takes ``uniforms`` random numbers in [0, 1). A PIL image is augmented by torchvision.
    `augment_batch` does the same to a batch on any device, without waiting for a GPU: pixels are
    moved exactly as Pillow does, and values differ by its rounding. What lies outside the image has
    the value ``fill``.
    """

    transform: v2.AutoAugment | v2.RandAugment
    levels: Sequence[tuple[str, int | None]]  # of each operation that may be drawn, one of ``bins``
    bins: int
    uniforms: int
    fill: int

    def __post_init__(self):
        # The tables are built once for each size of images.
        self._operations = cache(self._build_operations)
        self._tables = cache(self._build_tables)

    def draw(self, uniforms: np.ndarray) -> np.ndarray:
        """Return the operations to apply to each image in turn, as indices, int [B, N]."""
        raise NotImplementedError

    def __call__(self, image: Image.Image, uniforms: np.ndarray) -> Image.Image:
        """Return ``image`` augmented by the operations that ``uniforms`` [`uniforms`] draw."""
        operations = self._operations(image.height, image.width)
        for number in self.draw(uniforms[None])[0]:
            image = self._apply(image, operations[number])
        return image

    def augment_batch(self, images: Tensor, uniforms: np.ndarray) -> Tensor:
        """Return ``images``, uint8 [B, 3, Y, X], augmented; they may change.

        ``uniforms`` are [B, `uniforms`].
        """
        return self.apply(images, to_device(self.draw(uniforms), images.device))

    def apply(self, images: Tensor, drawn_BN: Tensor) -> Tensor:
        """Return ``images`` augmented by the operations that `draw` has returned; they may change.

        On a GPU no shape depends on what was drawn: a CUDA graph may record this.
        """
        tables = self._tables(*images.shape[2:], images.device)
        for drawn_B in drawn_BN.unbind(1):
            types_B = tables.types[drawn_B]
            for number, change in enumerate(TYPES.values()):
                has_type_B = types_B == number
                if images.is_cpu:
                    # Eight times less work than below, but the host has to know their number.
                    (rows,) = has_type_B.nonzero(as_tuple=True)
                    if len(rows):
                        changed = change(images[rows], drawn_B[rows], tables)
                        images[rows] = changed.to(images.dtype)
                else:
                    changed = change(images, drawn_B, tables).to(images.dtype)
                    images = torch.where(has_type_B[:, None, None, None], changed, images)
        return images

    def _build_operations(self, height: int, width: int) -> list[Operation]:
        """Return all operations for images of that size, the identity last.

        Operation i of `levels` is at 2 i with the negative magnitude and at 2 i + 1 with the
        positive one. Both are equal where it has no sign.
        """
        operations: list[Operation] = []
        for name, level in self.levels:
            magnitudes_of, is_signed = self.transform._AUGMENTATION_SPACE[name]
            magnitudes = magnitudes_of(self.bins, height, width)
            # Operations such as Invert have no magnitudes.
            magnitude = 0.0 if magnitudes is None else float(magnitudes.numpy()[level])
            operations.append((name, -magnitude if is_signed else magnitude))
            operations.append((name, magnitude))
        return [*operations, ("Identity", 0.0)]

    def _apply(self, image: Image.Image, operation: Operation) -> Any:
        """Return what torchvision makes of an image."""
        return self.transform._apply_image_or_video_transform(
            image,
            *operation,
            self.transform.interpolation,
            self.transform._fill,
        )

    def _build_tables(self, height: int, width: int, device: torch.device) -> OperationTables:
        """Find the tables by applying torchvision's operations to images of numbers."""
        operations = self._operations(height, width)

        def apply_to(image: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
            """Return ``image`` after each operation, those that are not in ``names`` left out."""
            results = []
            for operation in operations:
                is_named = operation[0] in names
                result = self._apply(Image.fromarray(image), operation) if is_named else image
                results.append(np.asarray(result).ravel())
            return np.stack(results)

        # Each pixel holds its number, above the fill value, so that the result says where it went.
        first = self.fill + 1
        numbers = np.arange(height * width, dtype=np.int32)
        pixels = numbers.reshape(height, width) + first
        sources = apply_to(pixels, MOVES).astype(np.int64) - first
        # The fill value has become -1: such a pixel comes from outside.
        sources[sources < 0] = height * width
        old_values = np.arange(256, dtype=np.uint8)
        values = apply_to(old_values[None], TABLES)
        factors = np.array([1 + magnitude for _, magnitude in operations], np.float32)
        return OperationTables(
            types=to_device(np.array([_type_of(name) for name, _ in operations]), device),
            sources=to_device(sources, device),
            values=to_device(values, device),
            factors=to_device(factors[:, None, None, None], device),
            fill=self.fill,
        )


class RandAugment(Policy):
    """Apply ``operations`` of torchvision's 14, drawn independently (arXiv 1909.13719).

    ``magnitude``, the same for all, is from 0 to 10, the largest, as in the paper, TensorFlow and
    timm; torchvision counts the same range from 0 to 30.
    """

    def __init__(self, operations: int, magnitude: float):
        grey = 128
        transform = v2.RandAugment(fill=grey)
        level = round(magnitude / LEVELS * BINS)
        levels = [(name, level) for name in transform._AUGMENTATION_SPACE]
        super().__init__(transform, levels, BINS + 1, 2 * operations, grey)

    def draw(self, uniforms: np.ndarray) -> np.ndarray:
        # Two numbers for each of N operations: which one, and its sign.
        uniforms_BN2 = uniforms.reshape(len(uniforms), -1, 2)
        which_BN, sign_BN = uniforms_BN2.transpose(2, 0, 1)
        operation_BN = (len(self.levels) * which_BN).astype(int)
        return 2 * operation_BN + (2 * sign_BN).astype(int)


class AutoAugment(Policy):
    """Apply one of the 25 pairs of operations for CIFAR-10 (arXiv 1805.09501, table 7)."""

    UNIFORMS = 5  # the pair; then for each of its operations whether it is applied, and its sign

    def __init__(self):
        transform = v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)
        # Each pair has two of (name, probability, level).
        operations = list(chain(*transform._policies))
        levels = [(name, level) for name, _, level in operations]
        super().__init__(transform, levels, LEVELS, self.UNIFORMS, fill=0)
        probabilities = [probability for _, probability, _ in operations]
        self.probabilities = np.reshape(probabilities, (-1, 2))

    def draw(self, uniforms: np.ndarray) -> np.ndarray:
        pair_B = (len(self.probabilities) * uniforms[:, 0]).astype(int)
        uniforms_B22 = uniforms[:, 1:].reshape(-1, 2, 2)
        applied_B2, sign_B2 = uniforms_B22.transpose(2, 0, 1)
        # A pair has four operations: the first with either sign, then the second.
        drawn_B2 = 4 * pair_B[:, None] + [0, 2] + (2 * sign_B2).astype(int)
        # An operation that is not applied is the identity: all images then have equally many.
        is_applied_B2 = applied_B2 < self.probabilities[pair_B]
        identity = 2 * len(self.levels)
        return np.where(is_applied_B2, drawn_B2, identity)


class TimmRandAugment:
    """timm's RandAugment as ``text`` describes it, seeded by one random number for each image."""

    uniforms = 1

    def __init__(self, text: str, mean: Sequence[float], interpolation: str):
        # The import takes a second.
        from timm.data.auto_augment import posterize, rand_augment_transform
        from timm.data.transforms import str_to_pil_interp

        options = {
            "img_mean": tuple(round(255 * value) for value in mean),
            "interpolation": str_to_pil_interp(interpolation),
        }
        self.transform = rand_augment_transform(text, options)
        for operation in self.transform.ops:
            # timm's own passes 0 bits to Pillow, which may refuse them.
            if operation.aug_fn is posterize:
                operation.aug_fn = _posterize

    def __call__(self, image: Image.Image, uniforms: np.ndarray) -> Image.Image:
        """Return ``image`` augmented.

        This seeds `random` and NumPy's global generator, with DATA.workers=0 in the main process.
        """
        seed = int(2**32 * uniforms[0])
        random.seed(seed)
        np.random.seed(seed)
        return self.transform(image)


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep ``bits`` of each value, as timm does."""
    # At magnitude 10 `Posterize` keeps no bits, which Pillow 13 refuses.
    return ImageOps.posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)


def move(images: Tensor, operations: Tensor, tables: OperationTables) -> Tensor:
    """Return each pixel of ``images`` [B, 3, Y, X] replaced by its source."""
    sources_BP = tables.sources[operations]
    # One more pixel stands for all outside of the image.
    pixels_BCP = F.pad(images.flatten(2), (0, 1), value=tables.fill)
    sources_BCP = sources_BP[:, None].expand(-1, 3, -1)
    return pixels_BCP.gather(2, sources_BCP).view_as(images)


def look_up(images: Tensor, operations: Tensor, tables: OperationTables) -> Tensor:
    """Return each value of ``images`` [B, 3, Y, X] replaced by its new one."""
    values_B256 = tables.values[operations]
    values_BC256 = values_B256[:, None].expand(-1, 3, -1)
    pixels_BCP = images.flatten(2).long()
    return values_BC256.gather(2, pixels_BCP).view_as(images)


def auto_contrast(images: Tensor, *_: Any) -> Tensor:
    """Return each channel's range stretched to 0 to 255, unless it has one value.

    torchvision's for batches rounds otherwise than Pillow, in 4 % of the values.
    """
    low = images.amin((2, 3), keepdim=True).float()
    high = images.amax((2, 3), keepdim=True).float()
    # Where a channel has one value this divides by 0: `torch.where` does not take the result.
    # uint8 - float32 is float32
    stretched = (images - low) * (255 / (high - low))
    return torch.where(high > low, stretched, images)


def blend(
    start_of: Callable[[Tensor], Tensor],
    images: Tensor,
    operations: Tensor,
    tables: OperationTables,
) -> Tensor:
    """Return images extrapolated by their factors from a changed version, ``start_of`` them."""
    pixels = images.float()
    factors_B111 = tables.factors[operations]
    return torch.lerp(start_of(pixels), pixels, factors_B111).clamp_(0, 255)


def mean_grey(pixels: Tensor) -> Tensor:
    """Return the mean brightness of each image, float32 [B, 1, 1, 1]."""
    return luma(pixels).mean((2, 3), keepdim=True).round_()


def smooth(pixels: Tensor) -> Tensor:
    """Return blurred images, as Pillow's SMOOTH filter, which leaves the outermost pixels."""
    blurred = pixels.clone()
    inner = blurred[..., 1:-1, 1:-1]
    # Pillow's smoothing filter: weight 5 for a pixel and 1 for each of its 8 neighbours.
    neighbours = 9 * F.avg_pool2d(pixels, 3, 1)
    smoothed = neighbours.add_(inner, alpha=4).div_(13)
    inner.copy_(smoothed.round_())
    return blurred


MOVES = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
# Of these operations the new value of a pixel depends on its old value alone.
TABLES = ("Brightness", "Posterize", "Solarize", "Invert")
# What changes a batch, by the names of the operations.
TYPES: dict[tuple[str, ...], Callable[[Tensor, Tensor, OperationTables], Tensor]] = {
    MOVES: move,
    TABLES: look_up,
    ("AutoContrast",): auto_contrast,
    ("Equalize",): lambda images, *_: equalize_image(images),
    ("Color",): partial(blend, luma),
    ("Contrast",): partial(blend, mean_grey),
    ("Sharpness",): partial(blend, smooth),
}
IDENTITY = len(TYPES)


def _type_of(name: str) -> int:
    """Return the index in `TYPES` of an operation."""
    return next((index for index, names in enumerate(TYPES) if name in names), IDENTITY)
