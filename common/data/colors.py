"""Colour changes of training batches on their device: 3-Augment and colour jitter.

3-Augment is DeiT III's (arXiv 2204.07118). Images are normalised, float32 [B, 3, Y, X]; the changes
compute with values of 0 to 255.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from common.data.loader import to_device

RADIUS = 8  # pixels that the blur's kernel reaches: four times the largest sigma
# One chooses 3-Augment's operation and one its strength; three are the factors of the jitter.
COLOR_UNIFORMS = 5


def augment_colors(
    images: Tensor,
    uniforms: np.ndarray,
    *,
    three_augment: bool,
    jitter: float,
    mean: Sequence[float],
    std: Sequence[float],
) -> None:
    """Change the colours of ``images`` in place, by ``uniforms`` float64 [B, `COLOR_UNIFORMS`].

    With ``three_augment`` an image is made grey, solarised or blurred, each for a third of the
    images. Then brightness, contrast and saturation are multiplied by factors between
    ``1 - jitter`` and ``1 + jitter``, and the result is clipped. ``mean`` and ``std`` are those the
    images were normalised with, RGB in [0, 1].

    Values are rounded to 8 bits. DeiT's own code differs by rounding, by Pillow's approximation of
    the Gaussian, and by clipping between the jitter's three operations, whose order is otherwise
    without effect.
    """
    mean_C11 = _to_pixels(mean, images)
    std_C11 = _to_pixels(std, images)
    # In place: `pixels` and ``images`` are one tensor from here on.
    pixels = images.mul_(std_C11).add_(mean_C11).round_()
    if three_augment:
        operation_B = np.floor(3 * uniforms[:, 0])
        for number, change in enumerate((grey, solarise, blur)):
            # Chosen on the host: it knows their number without waiting for a GPU.
            (chosen,) = np.nonzero(operation_B == number)
            if len(chosen):
                rows = to_device(chosen, images.device)
                sigmas = 0.1 + 1.9 * uniforms[chosen, 1]
                pixels[rows] = change(pixels[rows], sigmas)
    if jitter:
        changes_B3 = jitter * (2 * uniforms[:, 2:] - 1)
        factors_B3 = (1 + changes_B3).astype(np.float32)
        factors_3B = to_device(factors_B3, images.device).T
        adjusted = adjust(pixels, *factors_3B[..., None, None, None])
        pixels.copy_(adjusted.round_())
    pixels.sub_(mean_C11).div_(std_C11)


def _to_pixels(values: Sequence[float], images: Tensor) -> Tensor:
    """Return RGB values in [0, 1] as 0 to 255, [3, 1, 1], on the device of ``images``."""
    array = np.array(values)[:, None, None] * 255
    return to_device(array.astype(np.float32), images.device)


def grey(pixels: Tensor, _: np.ndarray) -> Tensor:
    """Return images without their colours."""
    return luma(pixels).expand_as(pixels)


def solarise(pixels: Tensor, _: np.ndarray) -> Tensor:
    """Return images whose upper half of values is inverted."""
    return torch.where(pixels >= 128, 255 - pixels, pixels)


def blur(pixels: Tensor, sigmas: np.ndarray) -> Tensor:
    """Return each image blurred by a Gaussian of its sigma [B], rounded; the edge is repeated."""
    distances_K = np.arange(-RADIUS, RADIUS + 1)
    deviations_BK = distances_K / sigmas[:, None]
    kernels_BK = np.exp(-0.5 * deviations_BK**2)
    kernels_BK /= kernels_BK.sum(1, keepdims=True)
    # Each image has a kernel of its own: P = 3 B planes are groups of one convolution.
    kernels_PK = np.repeat(kernels_BK, 3, axis=0).astype(np.float32)
    weight_P11K = to_device(kernels_PK[:, None, None], pixels.device)
    # The kernel is separable: along rows, then along columns.
    planes = F.pad(pixels, (RADIUS,) * 4, mode="replicate")
    planes = planes.flatten(0, 1)  # [P, Y, X]
    planes = F.conv2d(planes, weight_P11K, groups=len(weight_P11K))
    planes = F.conv2d(planes, weight_P11K.mT, groups=len(weight_P11K))
    return planes.view_as(pixels).round_()


def adjust(
    pixels: Tensor,
    brightness: Tensor,
    contrast: Tensor,
    saturation: Tensor,
) -> Tensor:
    """Return images with those factors, each [B, 1, 1, 1], applied."""
    grey_level = luma(pixels)
    average = grey_level.mean((1, 2, 3), keepdim=True)
    # Saturation does not change the mean grey level, from which contrast extrapolates.
    pixels = torch.lerp(grey_level, pixels, saturation)
    pixels = torch.lerp(average, pixels, contrast)
    return (brightness * pixels).clamp_(0, 255)


def luma(pixels: Tensor) -> Tensor:
    """Return the rounded luma of ITU-R 601 [B, 1, Y, X], as Pillow."""
    red, green, blue = pixels.split(1, dim=1)
    return (0.299 * red + 0.587 * green + 0.114 * blue).round_()
