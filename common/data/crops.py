"""Random crops and flips for training, the centre crop for evaluation.

Crops are computed from image sizes and uniform numbers before a pixel is decoded, so that all loaders, in any number of
processes, produce the same ones.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

TRIES = 10
# for each try an area and an aspect ratio; then top, left and flip
UNIFORMS_PER_SAMPLE = 2 * TRIES + 3


class Crops(NamedTuple):
    """What to do with each of B images: decode a window, resample a region of it to the network's square, mirror it.

    The window's ``start`` and ``shape`` are int32 [B, 2], (y, x) in pixels of the image; ``region_start`` and
    ``region_end`` are float32 [B, 2] in pixels of the window; ``flip`` is bool [B].
    """

    start: np.ndarray
    shape: np.ndarray
    region_start: np.ndarray
    region_end: np.ndarray
    flip: np.ndarray


@dataclass(frozen=True)
class RandomCrop:
    """Crop a random share of the area at a random aspect ratio, and mirror half of the images if ``flip``.

    The distribution is that of torchvision's ``RandomResizedCrop`` (Inception's crop, arXiv 1409.4842): ten tries, then
    the largest central crop of an allowed ratio. ``scale`` is the share of the area, ``ratio`` is width / height.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    interpolation: str = "bilinear"

    def __call__(self, heights: np.ndarray, widths: np.ndarray, uniforms: np.ndarray) -> Crops:
        """Return the crops of images of those sizes, int [B], from the first `UNIFORMS_PER_SAMPLE` of ``uniforms``."""
        heights, widths = np.asarray(heights, np.int64), np.asarray(widths, np.int64)
        height, width = self._sizes(heights, widths, uniforms[:, :TRIES], uniforms[:, TRIES : 2 * TRIES])
        accepted = height > 0
        central_height, central_width = self._central(heights, widths)
        height, width = np.where(accepted, height, central_height), np.where(accepted, width, central_width)
        top_uniform, left_uniform, flip_uniform = uniforms[:, 2 * TRIES : UNIFORMS_PER_SAMPLE].T
        top = np.where(accepted, np.floor(top_uniform * (heights - height + 1)), (heights - height) // 2)
        left = np.where(accepted, np.floor(left_uniform * (widths - width + 1)), (widths - width) // 2)
        start, shape = np.stack([top, left], axis=1), np.stack([height, width], axis=1)
        return _crops(start, shape, np.zeros_like(shape), shape, (flip_uniform < 0.5) & self.flip)

    def _sizes(
        self, heights: np.ndarray, widths: np.ndarray, area_uniforms: np.ndarray, ratio_uniforms: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return height and width of the first try that fits in each image, 0 where none does."""
        area = (heights * widths)[:, None] * (self.scale[0] + (self.scale[1] - self.scale[0]) * area_uniforms)
        low, high = np.log(self.ratio)
        ratio = np.exp(low + (high - low) * ratio_uniforms)
        height, width = np.rint(np.sqrt(area / ratio)), np.rint(np.sqrt(area * ratio))
        fits = (height > 0) & (height <= heights[:, None]) & (width > 0) & (width <= widths[:, None])
        first = fits.argmax(axis=1)[:, None]
        size = np.where(fits, np.stack([height, width]), 0)
        height, width = np.take_along_axis(size, first[None], axis=2)[..., 0]
        return height, width

    def _central(self, heights: np.ndarray, widths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return height and width of the largest crop whose aspect ratio is allowed."""
        low, high = self.ratio
        shape = widths / heights
        height = np.where(shape < low, np.rint(widths / low), heights)
        width = np.where(shape > high, np.rint(heights * high), widths)
        return height, width


@dataclass(frozen=True)
class CenterCrop:
    """Resize the short side to ``short_side`` and cut out the central ``size`` square, just as torchvision does.

    Only the part of the image that reaches those pixels is decoded: `MARGIN` pixels more on each side than the square,
    of the image or of the result, whichever are larger, for the antialiasing filter.
    """

    size: int
    short_side: int
    interpolation: str = "bilinear"

    MARGIN = 2

    def __call__(self, heights: np.ndarray, widths: np.ndarray, uniforms: np.ndarray | None = None) -> Crops:
        """Return the crops of images of those sizes, int [B]; nothing is random in them."""
        shape = np.stack([heights, widths], axis=1).astype(np.int64)
        # torchvision.transforms.functional rounds the long side down (_compute_resized_output_size) and the crop's
        # offset half to even (center_crop)
        resized = shape * self.short_side // shape.min(axis=1, keepdims=True)
        offset = np.rint((resized - self.size) / 2)
        scale = shape / resized
        margin = self.MARGIN * np.maximum(scale, 1)
        begin, end = offset * scale, (offset + self.size) * scale
        start = np.floor(np.maximum(begin - margin, 0))
        stop = np.ceil(np.minimum(end + margin, shape))
        return _crops(start, stop - start, begin - start, end - start, np.zeros(len(shape), bool))


def _crops(
    start: np.ndarray, shape: np.ndarray, region_start: np.ndarray, region_end: np.ndarray, flip: np.ndarray
) -> Crops:
    window = start.astype(np.int32), shape.astype(np.int32)
    return Crops(*window, region_start.astype(np.float32), region_end.astype(np.float32), flip)
