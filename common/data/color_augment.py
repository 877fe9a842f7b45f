"""3-Augment (DeiT III, arXiv 2204.07118) and colour jitter, of whole batches on their device, after any loader."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as in Pillow
SIGMA = (0.1, 2.0)
RADIUS = 8  # of the blur's kernel: four times the largest sigma
UNIFORMS_PER_SAMPLE = 5


class ColorAugment:
    """Change the colours of normalised images [B, 3, Y, X] in place, using one row of `uniforms` per image.

    With ``three_augment`` an image is made grey, solarised or blurred, each for a third of the images. Then its
    brightness, contrast and saturation are multiplied by factors from ``1 - jitter`` to ``1 + jitter``, clipped once at
    the end. Values are rounded to 8 bits. DeiT's own code differs by rounding, by Pillow's approximation of the
    Gaussian, and by clipping between the jitter's three operations, whose order is otherwise without effect.
    """

    def __init__(self, three_augment: bool, jitter: float, mean: Sequence[float], std: Sequence[float]) -> None:
        self.three_augment, self.jitter, self.mean, self.std = three_augment, jitter, mean, std

    def __bool__(self) -> bool:
        return self.three_augment or self.jitter > 0

    def __call__(self, images: Tensor, uniforms: np.ndarray) -> None:
        """Augment ``images``; ``uniforms`` in [0, 1) are [B, `UNIFORMS_PER_SAMPLE`]."""
        mean, std = (_copy(np.array(values)[:, None, None] * 255, images) for values in (self.mean, self.std))
        pixels = images.mul_(std).add_(mean).round_()
        choices = np.floor(3 * uniforms[:, 0])
        changes = (
            lambda pixels, _: luma(pixels).expand_as(pixels),
            lambda pixels, _: torch.where(pixels >= 128, 255 - pixels, pixels),  # solarised
            blur,
        )
        for number, change in enumerate(changes if self.three_augment else ()):
            (rows,) = np.nonzero(choices == number)
            place = torch.from_numpy(rows).to(images.device, non_blocking=True)
            sigmas = _copy(SIGMA[0] + (SIGMA[1] - SIGMA[0]) * uniforms[rows, 1], pixels)
            if len(rows):
                pixels[place] = change(pixels[place], sigmas).round()
        if self.jitter:
            factors = _copy(1 + self.jitter * (2 * uniforms[:, 2:] - 1), pixels)
            pixels.copy_(adjust(pixels, *factors.T[..., None, None, None]).round_())
        pixels.sub_(mean).div_(std)


def blur(pixels: Tensor, sigmas: Tensor) -> Tensor:
    """Return images [B, 3, Y, X], each blurred by a Gaussian of its sigma [B]; the edge is repeated around them."""
    distance = torch.arange(-RADIUS, RADIUS + 1, device=pixels.device)
    kernels = torch.exp(-0.5 * (distance / sigmas[:, None]) ** 2)
    kernels = (kernels / kernels.sum(1, keepdim=True))[:, :, None, None, None]
    for dim, padding in ((3, (RADIUS, RADIUS, 0, 0)), (2, (0, 0, RADIUS, RADIUS))):
        padded, size = F.pad(pixels, padding, mode="replicate"), pixels.shape[dim]
        parts = (kernels[:, tap] * padded.narrow(dim, tap, size) for tap in range(2 * RADIUS + 1))
        pixels = sum(parts, start=torch.zeros_like(pixels))
    return pixels


def adjust(pixels: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Return images of 0 to 255 with those factors applied."""
    grey_level = luma(pixels)
    average = grey_level.mean((1, 2, 3), keepdim=True)
    pixels = torch.lerp(average, torch.lerp(grey_level, pixels, saturation), contrast)
    return (brightness * pixels).clamp_(0, 255)


def luma(pixels: Tensor) -> Tensor:
    """Return the rounded luma [B, 1, Y, X]."""
    red, green, blue = pixels.split(1, dim=1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).round_()


def _copy(values: np.ndarray, like: Tensor) -> Tensor:
    """Return ``values`` on the device and in the type of ``like``, without waiting for a GPU."""
    return torch.from_numpy(values).to(like, non_blocking=True)
