"""From a decoded image to the network's input: crop and mirror, resize as Pillow does, normalise.

Crops are computed from image sizes and uniform numbers before a pixel is decoded, so that all
loaders, in any number of processes, produce the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

TRIES = 10
# for each try an area and an aspect ratio; then top, left and flip
CROP_UNIFORMS = 2 * TRIES + 3
MARGIN = 2
REFLECTED = 4  # pixels on each side of the simple random crop


class Crops(NamedTuple):
    """What to do with each of B images: decode a window, resample a region of it to the network's
    square, mirror it.

    The window's ``start`` and ``shape`` are int32 [B, 2], (y, x) in pixels of the image;
    ``region_start`` and ``region_end`` are float32 [B, 2] in pixels of the window; ``flip`` is bool
    [B]. Before it is mirrored, the square is moved by ``shift``, int32 [B, 2], and what lies
    outside the image then is its reflection (`reflected`).
    """

    start: np.ndarray
    shape: np.ndarray
    region_start: np.ndarray
    region_end: np.ndarray
    flip: np.ndarray
    shift: np.ndarray


@dataclass(frozen=True)
class RandomCrop:
    """Crop a random share of the area at a random aspect ratio, and mirror half of the images if
    ``flip``.

    The distribution is that of torchvision's ``RandomResizedCrop`` (Inception's crop, arXiv
    1409.4842): ten tries, then the largest central crop of an allowed ratio. ``scale`` is the share
    of the area, ``ratio`` is width / height.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    interpolation: str = "bilinear"

    def __call__(self, shape: np.ndarray, uniforms: np.ndarray) -> Crops:
        """Return the crops of images of ``shape``, int64 [B, 2], from the first `CROP_UNIFORMS` of
        ``uniforms``.
        """
        area = shape.prod(1, keepdims=True) * (
            self.scale[0] + (self.scale[1] - self.scale[0]) * uniforms[:, :TRIES]
        )
        low, high = np.log(self.ratio)
        ratio = np.exp(low + (high - low) * uniforms[:, TRIES : 2 * TRIES])
        tries = np.stack([np.rint(np.sqrt(area / ratio)), np.rint(np.sqrt(area * ratio))], axis=2)
        fits = np.all((tries > 0) & (tries <= shape[:, None]), axis=2)
        accepted = np.any(fits, axis=1)[:, None]
        size = np.where(
            accepted, tries[np.arange(len(tries)), fits.argmax(1)], self._central(shape)
        )
        place = np.floor(uniforms[:, 2 * TRIES : 2 * TRIES + 2] * (shape - size + 1))
        start = np.where(accepted, place, (shape - size) // 2)
        return _crops(
            start, size, np.zeros_like(size), size, (uniforms[:, 2 * TRIES + 2] < 0.5) & self.flip
        )

    def _central(self, shape: np.ndarray) -> np.ndarray:
        """Return height and width of the largest crop whose aspect ratio is allowed."""
        (heights, widths), (low, high) = shape.T, self.ratio
        height = np.where(widths / heights < low, np.rint(widths / low), heights)
        width = np.where(widths / heights > high, np.rint(heights * high), widths)
        return np.stack([height, width], axis=1)


@dataclass(frozen=True)
class SimpleCrop:
    """Resize the short side to ``size``, pad by reflection, and cut out a random square of
    ``size``.

    This is DeiT III's simple random crop (arXiv 2204.07118): torchvision's ``Resize`` and
    ``RandomCrop(padding=4, padding_mode="reflect")``. Half of the images are mirrored if ``flip``.
    """

    size: int
    flip: bool = True
    interpolation: str = "bilinear"

    def __call__(self, shape: np.ndarray, uniforms: np.ndarray) -> Crops:
        """Return the crops of images of ``shape``, int64 [B, 2], from the last of `CROP_UNIFORMS`
        ``uniforms``.
        """
        resized = _resized(shape, self.size)
        places = resized + 2 * REFLECTED - self.size + 1
        offset = (
            np.floor(uniforms[:, 2 * TRIES : 2 * TRIES + 2] * places).astype(np.int64) - REFLECTED
        )
        inside = np.clip(offset, 0, resized - self.size)
        flip = (uniforms[:, 2 * TRIES + 2] < 0.5) & self.flip
        return _square(shape, resized, inside, self.size)._replace(
            flip=flip, shift=(offset - inside).astype(np.int32)
        )


@dataclass(frozen=True)
class CenterCrop:
    """Resize the short side to ``short_side`` and cut out the central ``size`` square, just as
    torchvision does.
    """

    size: int
    short_side: int
    interpolation: str = "bilinear"

    def __call__(self, shape: np.ndarray, uniforms: np.ndarray) -> Crops:
        """Return the crops of images of ``shape``, int64 [B, 2]; nothing is random in them."""
        resized = _resized(shape, self.short_side)
        # torchvision.transforms.functional.center_crop rounds half to even
        return _square(shape, resized, np.rint((resized - self.size) / 2), self.size)


def reflected(size: int, shift: np.ndarray) -> np.ndarray:
    """Return which of ``size`` pixels a square that is moved by ``shift`` [B] shows, [B, size]."""
    return np.pad(np.arange(size), REFLECTED, mode="reflect")[
        REFLECTED + shift[:, None] + np.arange(size)
    ]


def _resized(shape: np.ndarray, short_side: int) -> np.ndarray:
    # torchvision.transforms.functional rounds the long side down (_compute_resized_output_size)
    return shape * short_side // shape.min(axis=1, keepdims=True)


def _square(shape: np.ndarray, resized: np.ndarray, offset: np.ndarray, size: int) -> Crops:
    """Return the square at ``offset`` of images that are resized from ``shape`` to ``resized``, all
    int [B, 2].

    Only the part of the image that reaches those pixels is decoded: `MARGIN` pixels more on each
    side than the square, of the image or of the result, whichever are larger, for the antialiasing
    filter.
    """
    scale = shape / resized
    margin = MARGIN * np.maximum(scale, 1)
    begin, end = offset * scale, (offset + size) * scale
    start = np.floor(np.maximum(begin - margin, 0))
    stop = np.ceil(np.minimum(end + margin, shape))
    return _crops(start, stop - start, begin - start, end - start, np.zeros(len(shape), bool))


def _crops(
    start: np.ndarray,
    shape: np.ndarray,
    region_start: np.ndarray,
    region_end: np.ndarray,
    flip: np.ndarray,
) -> Crops:
    window = start.astype(np.int32), shape.astype(np.int32)
    region = region_start.astype(np.float32), region_end.astype(np.float32)
    return Crops(*window, *region, flip, np.zeros_like(window[0]))


Crop = RandomCrop | SimpleCrop | CenterCrop


def crop_image(image: np.ndarray, crop: Crop, size: int, uniforms: Any = None) -> np.ndarray:
    """Return the crop of an image, uint8 [Y, X, 3], as [``size``, ``size``, 3], by ``uniforms`` [1,
    K].
    """
    crops = crop(np.array([image.shape[:2]]), uniforms)
    top, left, height, width = *crops.start[0].tolist(), *crops.shape[0].tolist()
    return resample(
        image[top : top + height, left : left + width], crops, 0, size, crop.interpolation
    )


def resample(
    window: np.ndarray, crops: Crops, row: int, size: int, interpolation: str
) -> np.ndarray:
    """Resample the region of a decoded window, uint8 [Y, X, 3], that ``crops`` has for an image;
    move and mirror it.
    """
    region = *crops.region_start[row].tolist(), *crops.region_end[row].tolist()
    if region == (0, 0, *window.shape[:2]):
        # Pillow's arithmetic in a third of its time, but with no region
        window_1CYX = torch.from_numpy(window).permute(2, 0, 1)[None]
        view = (
            F.interpolate(window_1CYX, (size, size), mode=interpolation, antialias=True)[0]
            .permute(1, 2, 0)
            .numpy()
        )
    else:
        top, left, bottom, right = region
        box, filter_ = (left, top, right, bottom), Image.Resampling[interpolation.upper()]
        view = np.asarray(Image.fromarray(window).resize((size, size), filter_, box))
    if crops.shift[row].any():
        view = view[np.ix_(*reflected(size, crops.shift[row]))]
    return view[:, ::-1] if crops.flip[row] else view


class Normalizer:
    """Normalise images to the network's input; ``mean`` and ``std`` are of RGB values from 0 to
    1.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        self.mean_C11, self.std_C11 = (
            torch.tensor(rgb, device=device)[:, None, None] * 255 for rgb in (mean, std)
        )

    def __call__(self, images_BCYX: Tensor) -> Tensor:
        """Return uint8 images, which are on the device, as (pixel - mean) / std, float32."""
        return images_BCYX.float().sub_(self.mean_C11).div_(self.std_C11)
