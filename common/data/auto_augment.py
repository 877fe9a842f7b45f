"""torchvision's AutoAugment and RandAugment for images and batches, and timm's for images."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
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
# the new value of a pixel depends on its old value alone
TABLES = ("Brightness", "Posterize", "Solarize", "Invert")
# A batch is sorted by these types of operation, so that the images of one type are a slice of it.
TYPES = (
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


@dataclass(frozen=True)
class OperationTables:
    """What each of N operations does to images of one size [Y, X]."""

    types: np.ndarray  # int [N], an index of TYPES
    sources: Tensor  # int64 [N, Y * X], the pixel moved to each position; Y * X is outside
    values: Tensor  # uint8 [N, 256], the new value of each old one
    factors: Tensor  # float32 [N, 1, 1, 1], of Color, Contrast and Sharpness


class Policy:
    """Augment by operations of torchvision's ``transform``, drawn by ``uniforms`` numbers in
    [0, 1) for each image.

    A PIL image is augmented by torchvision. `augment_batch` does the same to a batch on any device,
    without waiting for a GPU: pixels are moved exactly as Pillow does, and values differ by its
    rounding. What lies outside the image has the value ``fill``.
    """

    def __init__(
        self, transform: v2.AutoAugment | v2.RandAugment, uniforms: int, fill: int
    ) -> None:
        self.transform = transform
        self.uniforms = uniforms
        self.fill = fill
        # built once for each size of images
        self._operations = cache(self.build_operations)
        self._tables = cache(self._build_tables)

    def build_operations(self, height: int, width: int) -> list[Operation]:
        """Return all operations that may be drawn for images of that size."""
        raise NotImplementedError

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
        """Augment ``images``, uint8 [B, 3, Y, X], in place by ``uniforms`` [B, `uniforms`]; return
        them.
        """
        tables = self._tables(*images.shape[2:], images.device)
        for drawn in self.draw(uniforms).T:
            # sort the batch by type: moved, mapped by tables, blended, and unchanged images
            order = np.argsort(tables.types[drawn], kind="stable")
            counts = np.bincount(tables.types[drawn], minlength=len(TYPES)).tolist()
            rows, operations = to_device(np.stack([order, drawn[order]]), images.device)
            sizes = [counts[0], sum(counts[1:4]), sum(counts[4:7]), counts[7]]
            ordered = images[rows]
            moved, mapped, blended, _ = ordered.split(sizes)
            of_moved, of_mapped, of_blended, _ = operations.split(sizes)

            move(moved, tables.sources[of_moved], self.fill)
            map_values(mapped, tables.values[of_mapped[: counts[1]]], counts[1:4])
            blend(blended, tables.factors[of_blended], counts[4:7])
            images[rows] = ordered
        return images

    def _signed(
        self, name: str, level: int | None, bins: int, height: int, width: int
    ) -> list[Operation]:
        """Return an operation twice: with the negative magnitude of a level, if it has a sign, and
        with the positive one.
        """
        magnitudes_of, is_signed = self.transform._AUGMENTATION_SPACE[name]
        magnitudes = magnitudes_of(bins, height, width)
        magnitude = 0.0 if magnitudes is None else float(magnitudes.numpy()[level])
        return [(name, -magnitude if is_signed else magnitude), (name, magnitude)]

    def _apply(self, image: Image.Image, operation: Operation) -> Any:
        return self.transform._apply_image_or_video_transform(
            image, *operation, self.transform.interpolation, self.transform._fill
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
        pixels = np.arange(height * width, dtype=np.int32).reshape(height, width) + first
        sources = apply_to(pixels, MOVES).astype(np.int64) - first
        sources[sources < 0] = height * width
        values = apply_to(np.arange(256, dtype=np.uint8)[None], TABLES)
        factors = np.array([1 + magnitude for _, magnitude in operations], np.float32)
        return OperationTables(
            types=np.array([type_of(name) for name, _ in operations]),
            sources=to_device(sources, device),
            values=to_device(values, device),
            factors=to_device(factors[:, None, None, None], device),
        )


def type_of(name: str) -> int:
    """Return the index in `TYPES` of an operation."""
    return next(index for index, names in enumerate(TYPES) if name in names)


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
        operations: list[Operation] = []
        for name in self.names:
            operations += self._signed(name, self.level, BINS + 1, height, width)
        return operations

    def draw(self, uniforms: np.ndarray) -> np.ndarray:
        which_BN, sign_BN = uniforms.reshape(len(uniforms), -1, 2).transpose(2, 0, 1)
        # operation i is at 2 i with the negative magnitude, and at 2 i + 1 with the positive one
        return 2 * (len(self.names) * which_BN).astype(int) + (2 * sign_BN).astype(int)


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
            [(first[1], second[1]) for first, second in self.pairs]  # of (name, probability, level)
        )

    def build_operations(self, height: int, width: int) -> list[Operation]:
        operations: list[Operation] = []
        for pair in self.pairs:
            for name, _, level in pair:
                operations += self._signed(name, level, LEVELS, height, width)
        return [*operations, ("Identity", 0.0)]

    def draw(self, uniforms: np.ndarray) -> np.ndarray:
        pair_B = (len(self.pairs) * uniforms[:, 0]).astype(int)
        applied_B2, sign_B2 = uniforms[:, 1:].reshape(-1, 2, 2).transpose(2, 0, 1)
        # a pair has four operations: the first with either sign, then the second
        drawn_B2 = 4 * pair_B[:, None] + [0, 2] + (2 * sign_B2).astype(int)
        identity = 4 * len(self.pairs)
        return np.where(applied_B2 < self.probabilities[pair_B], drawn_B2, identity)


class TimmRandAugment:
    """timm's RandAugment as ``text`` describes it, seeded by one random number for each image."""

    uniforms = 1

    def __init__(self, text: str, mean: Sequence[float], interpolation: str) -> None:
        from timm.data.auto_augment import posterize, rand_augment_transform  # a second to import
        from timm.data.transforms import str_to_pil_interp

        options = {
            "img_mean": tuple(round(255 * value) for value in mean),
            "interpolation": str_to_pil_interp(interpolation),
        }
        self.transform = rand_augment_transform(text, options)
        for operation in self.transform.ops:
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
    """Keep ``bits`` of each value, as timm does; magnitude 10 keeps none, which Pillow 13
    refuses.
    """
    return ImageOps.posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)


def move(images: Tensor, sources: Tensor, fill: int) -> None:
    """Replace each pixel of ``images`` [B, 3, Y, X] by pixel ``sources`` [B, Y * X]; Y * X stands
    for ``fill``.
    """
    pixels = F.pad(images.flatten(2), (0, 1), value=fill)
    images.copy_(pixels.gather(2, sources[:, None].expand(-1, 3, -1)).view_as(images))


def map_values(images: Tensor, tables: Tensor, counts: list[int]) -> None:
    """Map values of ``images``, uint8 [B, 3, Y, X], in place: ``counts`` are those mapped by
    ``tables`` [counts[0], 256], by AutoContrast and by Equalize.
    """
    values_BCP = images.flatten(2).long()
    levels = torch.arange(256, device=images.device)
    low, high = torch.aminmax(values_BCP[counts[0] :], dim=2, keepdim=True)

    # AutoContrast: stretch each channel's range to 0 to 255, unless it has one value.
    lowest, _ = low.split(counts[1:])
    highest, equalize_highest = high.split(counts[1:])
    stretched = (levels - lowest) * (255 / (highest - lowest))
    stretch_BC256 = torch.where(highest > lowest, stretched, levels)

    # Equalize as Pillow does: a value becomes the number of pixels below it, in steps of a 255th
    # of all pixels but those of the highest value.
    equalized_BCP = values_BCP[counts[0] + counts[1] :]
    ones = torch.ones((), dtype=torch.long, device=images.device).expand_as(equalized_BCP)
    shape = (*equalized_BCP.shape[:2], 256)
    histogram = torch.zeros(shape, dtype=torch.long, device=images.device)
    histogram.scatter_add_(2, equalized_BCP, ones)
    step = (equalized_BCP.shape[2] - histogram.gather(2, equalize_highest)) // 255
    below = histogram.cumsum(2) - histogram
    spread = (below + step // 2) // step.clamp(min=1)
    equalize_BC256 = torch.where(step > 0, spread, levels).clamp_(max=255)

    tables_BC256 = torch.cat(
        [
            tables[:, None].expand(-1, 3, -1),
            stretch_BC256.to(torch.uint8),
            equalize_BC256.to(torch.uint8),
        ]
    )
    images.copy_(tables_BC256.gather(2, values_BCP).view_as(images))


def blend(images: Tensor, factors: Tensor, counts: list[int]) -> None:
    """Extrapolate ``images``, uint8 [B, 3, Y, X], in place by ``factors`` [B, 1, 1, 1].

    ``counts`` are those that start from their grey version (Color), from their mean (Contrast) and
    from their blurred version (Sharpness).
    """
    pixels = images.float()
    start = pixels.clone()
    _, constant, blurred = start.split(counts)
    colored = pixels[: counts[0] + counts[1]]
    red, green, blue = colored.unbind(1)
    grey = (0.299 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114).round_()[:, None]
    start[: len(colored)] = grey
    constant.copy_(grey[counts[0] :].mean((2, 3), keepdim=True).round_())
    # Pillow's SMOOTH filter, which leaves the outermost pixels: 5 for a pixel, 1 for its neighbours
    inner = blurred[..., 1:-1, 1:-1]
    neighbours = 9 * F.avg_pool2d(blurred, 3, 1)
    inner.copy_(neighbours.add_(inner, alpha=4).div_(13).round_())
    images.copy_(torch.lerp(start, pixels, factors).clamp_(0, 255))
