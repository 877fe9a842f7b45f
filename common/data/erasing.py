"""Random erasing of training batches on their device (Zhong et al., arXiv 1708.04896)."""

import numpy as np
import torch
from torch import Tensor

from common.data.crops import CROP_UNIFORMS, FLIP, RandomCrop
from common.data.loader import to_device

# Area and aspect ratio of the erased rectangle, as in torchvision and timm.
ERASED = RandomCrop(scale=(0.02, 1 / 3), ratio=(0.3, 3.3))
# The crop's numbers choose the rectangle, one more whether the image is erased.
ERASING_UNIFORMS = CROP_UNIFORMS + 1


def erase(
    images: Tensor,
    uniforms: np.ndarray,
    *,
    probability: float,
    mode: str,
) -> None:
    """Erase a rectangle of some ``images`` [B, 3, Y, X] in place.

    ``uniforms`` are float64 [B, `ERASING_UNIFORMS`]. The rectangle becomes 0, the mean, if ``mode``
    is "const", and normal noise if it is "pixel", drawn once a batch.
    """
    batch, _, height, width = images.shape
    device = images.device
    # On the host, as all crops are: a GPU gets the corners only.
    shape_B2 = np.full((batch, 2), (height, width))
    crops = ERASED(shape_B2, uniforms)
    stop_B2 = crops.start + crops.shape
    # An image that is not erased has an empty rectangle: nothing lies before 0.
    is_whole_B = uniforms[:, CROP_UNIFORMS] >= probability
    stop_B2[is_whole_B] = 0
    top_B1, left_B1 = to_device(crops.start, device).split(1, dim=1)
    bottom_B1, right_B1 = to_device(stop_B2, device).split(1, dim=1)

    # [Y] and [X], compared with corners [B, 1]: masks [B, Y] and [B, X]
    y = torch.arange(height, device=device)
    x = torch.arange(width, device=device)
    rows_BY = (top_B1 <= y) & (y < bottom_B1)
    columns_BX = (left_B1 <= x) & (x < right_B1)
    # A mask for the whole batch: a loop over images would launch kernels for each.
    erased_BYX = rows_BY[:, :, None] & columns_BX[:, None, :]
    erased_B1YX = erased_BYX[:, None]
    if mode == "const":
        images.masked_fill_(erased_B1YX, 0)
        return
    # The flip of the first image's crop is not used: it seeds the noise.
    seed = int(uniforms[0, FLIP] * 2**53)
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    noise = torch.randn(images.shape, generator=generator, device=device)
    images.copy_(torch.where(erased_B1YX, noise, images))
