"""From a decoded image to the network's input: crop and mirror, resize as Pillow does, normalise.

Crops are computed from image sizes and uniform numbers before a pixel is decoded, so that all
loaders, in any number of processes, produce the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from common.data.loader import to_device

TRIES = 10
CROP_UNIFORMS = 2 * TRIES + 3
# Where the random numbers of an image are: an area and an aspect ratio for each try, then the
# position (top, left) and whether to mirror.
AREAS = slice(0, TRIES)
RATIOS = slice(TRIES, 2 * TRIES)
POSITION = slice(2 * TRIES, 2 * TRIES + 2)
FLIP = 2 * TRIES + 2

MARGIN = 2  # pixels decoded around a crop, for the antialiasing filter
REFLECTED = 4  # pixels of padding on each side of the simple random crop


class Crops(NamedTuple):
    """The crops of B images: decode a window, resample a region of it to a square, mirror it.

    All pairs are (y, x). Before it is mirrored, the square is shifted; what then lies outside the
    image is filled by reflection (`reflected`).
    """

    start: np.ndarray  # int32 [B, 2], of the window, in pixels of the image
    shape: np.ndarray  # int32 [B, 2], of the window, in pixels of the image
    region_start: np.ndarray  # float32 [B, 2], in pixels of the window
    region_end: np.ndarray  # float32 [B, 2], in pixels of the window
    flip: np.ndarray  # bool [B]
    shift: np.ndarray  # int32 [B, 2], in pixels of the square


@dataclass(frozen=True)
class RandomCrop:
    """Crop a random share of the area at a random aspect ratio; mirror half of the images.

    The distribution is that of torchvision's ``RandomResizedCrop`` (Inception's crop, arXiv
    1409.4842): ten tries, then the largest central crop of an allowed ratio. ``scale`` is the share
    of the area, ``ratio`` is width / height. Without ``flip`` no image is mirrored.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    interpolation: str = "bilinear"

    def __call__(self, shape: np.ndarray, uniforms: np.ndarray) -> Crops:
        """Return the crops of images of ``shape``, int64 [B, 2].

        ``uniforms`` are float64 [B, at least `CROP_UNIFORMS`].
        """
        # T tries, each a share of the area, uniform, and an aspect ratio, uniform in its logarithm
        low, high = self.scale
        share_BT = low + (high - low) * uniforms[:, AREAS]
        pixels_B1 = shape.prod(1, keepdims=True)
        area_BT = pixels_B1 * share_BT
        low, high = np.log(self.ratio)
        # height x width is the area, width / height the ratio.
        ratio_BT = np.exp(low + (high - low) * uniforms[:, RATIOS])
        heights_BT = np.rint(np.sqrt(area_BT / ratio_BT))
        widths_BT = np.rint(np.sqrt(area_BT * ratio_BT))
        tries_BT2 = np.stack([heights_BT, widths_BT], axis=2)

        # Take the first try that lies inside the image, else the largest central crop.
        is_inside_BT2 = (tries_BT2 > 0) & (tries_BT2 <= shape[:, None])
        fits_BT = np.all(is_inside_BT2, axis=2)
        accepted_B1 = np.any(fits_BT, axis=1)[:, None]
        # argmax of booleans: the first True, or 0 if there is none.
        first_B = fits_BT.argmax(1)
        first_B2 = tries_BT2[np.arange(len(shape)), first_B]
        size_B2 = np.where(accepted_B1, first_B2, self._central(shape))
        # The number of rows and columns that the window may start in, less one.
        free_B2 = shape - size_B2
        position_B2 = np.floor(uniforms[:, POSITION] * (free_B2 + 1))
        start_B2 = np.where(accepted_B1, position_B2, free_B2 // 2)

        flip_B = (uniforms[:, FLIP] < 0.5) & self.flip
        return _crops(start_B2, size_B2, np.zeros_like(size_B2), size_B2, flip_B)

    def _central(self, shape: np.ndarray) -> np.ndarray:
        """Return height and width [B, 2] of the largest crop whose aspect ratio is allowed."""
        height_B, width_B = shape.T
        low, high = self.ratio
        # An image that is too tall keeps its width, one that is too wide its height.
        crop_height_B = np.minimum(height_B, np.rint(width_B / low))
        crop_width_B = np.minimum(width_B, np.rint(height_B * high))
        return np.stack([crop_height_B, crop_width_B], axis=1)


@dataclass(frozen=True)
class SimpleCrop:
    """Resize the short side to ``size``, pad by reflection, and cut out a random square.

    This is DeiT III's simple random crop (arXiv 2204.07118): torchvision's ``Resize`` and
    ``RandomCrop(padding=4, padding_mode="reflect")``. Half of the images are mirrored if ``flip``.
    """

    size: int
    flip: bool = True
    interpolation: str = "bilinear"

    def __call__(self, shape: np.ndarray, uniforms: np.ndarray) -> Crops:
        """Return the crops of images of ``shape``, int64 [B, 2].

        ``uniforms`` are float64 [B, at least `CROP_UNIFORMS`].
        """
        resized_B2 = _resized(shape, self.size)
        # The number of positions of the square in the padded image.
        positions_B2 = resized_B2 + 2 * REFLECTED - self.size + 1
        position_B2 = np.floor(uniforms[:, POSITION] * positions_B2).astype(np.int64)
        offset_B2 = position_B2 - REFLECTED
        # The padding is not decoded: the square is cut inside the image, then shifted.
        inside_B2 = np.clip(offset_B2, 0, resized_B2 - self.size)
        crops = _square(shape, resized_B2, inside_B2, self.size)
        flip_B = (uniforms[:, FLIP] < 0.5) & self.flip
        shift_B2 = offset_B2 - inside_B2
        return crops._replace(flip=flip_B, shift=shift_B2.astype(np.int32))


@dataclass(frozen=True)
class CenterCrop:
    """Resize the short side, and cut out the central square of ``size``, as torchvision does."""

    size: int
    short_side: int
    interpolation: str = "bilinear"

    def __call__(self, shape: np.ndarray, uniforms: np.ndarray) -> Crops:
        """Return the crops of images of ``shape``, int64 [B, 2]; nothing is random in them."""
        resized_B2 = _resized(shape, self.short_side)
        # torchvision.transforms.functional.center_crop rounds half to even.
        offset_B2 = np.rint((resized_B2 - self.size) / 2)
        return _square(shape, resized_B2, offset_B2, self.size)


def reflected(size: int, shift: np.ndarray) -> np.ndarray:
    """Return the pixel shown at each of ``size`` positions after a shift, int [B, size].

    ``shift`` is int [B], at most `REFLECTED` either way.
    """
    # [size + 2 * REFLECTED], then [B, size]
    padded = np.pad(np.arange(size), REFLECTED, mode="reflect")
    return padded[REFLECTED + shift[:, None] + np.arange(size)]


def _resized(shape: np.ndarray, short_side: int) -> np.ndarray:
    """Return the shape of images whose short side is resized to ``short_side``, int [B, 2]."""
    # torchvision.transforms.functional rounds the long side down (_compute_resized_output_size)
    return shape * short_side // shape.min(axis=1, keepdims=True)


def _square(shape: np.ndarray, resized: np.ndarray, offset: np.ndarray, size: int) -> Crops:
    """Return the crop of a square at ``offset`` in images resized from ``shape`` to ``resized``.

    All are int [B, 2]. The window contains the square and `MARGIN` pixels around it for the
    antialiasing filter, counted in pixels of the image or of the result, whichever are larger.
    """
    # Of both sides apart: the long side's is not quite the short one's, as `_resized` rounds it.
    scale_B2 = shape / resized
    # The square, in pixels of the image.
    begin_B2 = offset * scale_B2
    end_B2 = (offset + size) * scale_B2
    # The window, in whole pixels.
    margin_B2 = MARGIN * np.maximum(scale_B2, 1)
    start_B2 = np.floor(np.maximum(begin_B2 - margin_B2, 0))
    stop_B2 = np.ceil(np.minimum(end_B2 + margin_B2, shape))
    return _crops(
        start_B2,
        stop_B2 - start_B2,
        begin_B2 - start_B2,
        end_B2 - start_B2,
        flip=np.zeros(len(shape), bool),
    )


def _crops(
    start: np.ndarray,
    shape: np.ndarray,
    region_start: np.ndarray,
    region_end: np.ndarray,
    flip: np.ndarray,
) -> Crops:
    """Return `Crops` of the right dtypes, without a shift."""
    return Crops(
        start.astype(np.int32),
        shape.astype(np.int32),
        region_start.astype(np.float32),
        region_end.astype(np.float32),
        flip,
        shift=np.zeros(start.shape, np.int32),
    )


Crop = RandomCrop | SimpleCrop | CenterCrop


def at_size(crop: Crop, size: int) -> Crop:
    """Return a training crop for images of another size."""
    return replace(crop, size=size) if isinstance(crop, SimpleCrop) else crop


def crop_image(image: np.ndarray, crop: Crop, size: int, uniforms: Any = None) -> np.ndarray:
    """Crop an image, uint8 [Y, X, 3], by ``uniforms`` [1, K]; return uint8 [size, size, 3]."""
    crops = crop(np.array([image.shape[:2]]), uniforms)
    top, left = crops.start[0].tolist()
    height, width = crops.shape[0].tolist()
    window = image[top : top + height, left : left + width]
    top, left = crops.region_start[0].tolist()
    bottom, right = crops.region_end[0].tolist()
    if (top, left, bottom, right) == (0, 0, *window.shape[:2]):
        # The same arithmetic as Pillow's in a third of its time, but only for whole windows.
        window_1CYX = torch.from_numpy(window).permute(2, 0, 1)[None]
        view_1CYX = F.interpolate(
            window_1CYX,
            (size, size),
            mode=crop.interpolation,
            antialias=True,
        )
        view_YXC = view_1CYX[0].permute(1, 2, 0).numpy()
    else:
        filter_ = Image.Resampling[crop.interpolation.upper()]
        box = (left, top, right, bottom)
        resized = Image.fromarray(window).resize((size, size), filter_, box)
        view_YXC = np.asarray(resized)
    if crops.shift[0].any():
        rows, columns = reflected(size, crops.shift[0])
        view_YXC = view_YXC[np.ix_(rows, columns)]
    return view_YXC[:, ::-1] if crops.flip[0] else view_YXC


class Normalizer:
    """Normalise images to the network's input; ``mean`` and ``std`` are RGB in [0, 1]."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device):
        self.mean_C11 = torch.tensor(mean, device=device)[:, None, None] * 255
        self.std_C11 = torch.tensor(std, device=device)[:, None, None] * 255

    def __call__(self, images_BCYX: Tensor, is_padding: np.ndarray | None = None) -> Tensor:
        """Return uint8 images, which are on the device, as (pixel - mean) / std, float32.

        Rows of ``is_padding``, bool [B], are zeros.
        """
        images_BCYX = images_BCYX.float().sub_(self.mean_C11).div_(self.std_C11)
        # Asked on the host: a GPU's answer would be waited for.
        if is_padding is not None and is_padding.any():
            is_padding_B = to_device(is_padding, images_BCYX.device)
            images_BCYX.masked_fill_(is_padding_B[:, None, None, None], 0)
        return images_BCYX
