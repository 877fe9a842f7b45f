"""Random crops, mirroring and AutoAugment of image batches on their device.

Shape suffixes: B batch, C colours, Y X pixel rows and columns, P Q offsets of a crop.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from common.data.auto_augment import AutoAugment

# top, left and flip; then AutoAugment's
UNIFORMS_PER_SAMPLE = 3 + AutoAugment.UNIFORMS


class Augment:
    """Pad images by ``padding`` black pixels and crop them back, mirror half of them, and apply AutoAugment.

    ``autoaugment`` is None or "cifar10".
    """

    def __init__(self, padding: int = 4, flip: bool = True, autoaugment: str | None = None) -> None:
        self.padding, self.flip, self.policy = padding, flip, AutoAugment() if autoaugment else None

    def __call__(self, images_BCYX: Tensor, uniforms: np.ndarray) -> Tensor:
        """Return new images, uint8 [B, 3, Y, X], from ``uniforms`` float64 [B, `UNIFORMS_PER_SAMPLE`]."""
        offsets = np.floor(uniforms[:, :2] * (2 * self.padding + 1)).astype(np.int64)
        mirrored = np.flatnonzero((uniforms[:, 2] < 0.5) & self.flip)
        offsets_B2, mirrored_rows = (
            torch.from_numpy(values).to(images_BCYX.device, non_blocking=True) for values in (offsets, mirrored)
        )
        top_B, left_B = offsets_B2.unbind(1)
        images_BCYX = crop(images_BCYX, top_B, left_B, self.padding)
        images_BCYX[mirrored_rows] = images_BCYX[mirrored_rows].flip(-1)
        return self.policy.augment_batch(images_BCYX, uniforms[:, 3:]) if self.policy else images_BCYX


def crop(images_BCYX: Tensor, top_B: Tensor, left_B: Tensor, padding: int) -> Tensor:
    """Crop each padded image to its original size at its own offset, from 0 to ``2 * padding``."""
    height, width = images_BCYX.shape[-2:]
    windows_BCPQYX = F.pad(images_BCYX, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    return windows_BCPQYX[torch.arange(len(images_BCYX), device=images_BCYX.device), :, top_B, left_B]
