"""AutoAugment's image operations on batches, with one magnitude per image.

Every operation maps images uint8 [B, 3, Y, X] and magnitudes float32 [B] to new images uint8 [B, 3, Y, X], on any
device and without synchronising with it. Pixels equal those of torchvision's operation on each image: nearest
neighbours, black outside the image, results truncated. Operations without a strength ignore the magnitude.

Shape suffixes: B batch, C colours, Y X pixel rows and columns, V the 256 values of a pixel; 1 where one is for all.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

GREY = (0.2989, 0.587, 0.114)  # the weights of R, G and B in luma, ITU-R BT.601


def shear_y(images_BCYX: Tensor, slopes_B: Tensor) -> Tensor:
    """Shift every column up by its distance from the left edge times the slope."""
    slopes_B11 = slopes_B[:, None, None]
    return _warp(images_BCYX, y_x=slopes_B11, y=slopes_B11 * (images_BCYX.shape[-1] / 2))


def translate_x(images_BCYX: Tensor, shares_B: Tensor) -> Tensor:
    """Shift right by a fraction of the width, rounded towards 0 to whole pixels."""
    return _warp(images_BCYX, x=-(shares_B * images_BCYX.shape[-1]).trunc()[:, None, None])


def translate_y(images_BCYX: Tensor, shares_B: Tensor) -> Tensor:
    """Shift down by a fraction of the height, rounded towards 0 to whole pixels."""
    return _warp(images_BCYX, y=-(shares_B * images_BCYX.shape[-2]).trunc()[:, None, None])


def rotate(images_BCYX: Tensor, degrees_B: Tensor) -> Tensor:
    """Rotate anticlockwise about the centre."""
    radians_B11 = degrees_B.deg2rad()[:, None, None]
    sin_B11, cos_B11 = radians_B11.sin(), radians_B11.cos()
    return _warp(images_BCYX, x_x=cos_B11, x_y=-sin_B11, y_x=sin_B11, y_y=cos_B11)


def brightness(images_BCYX: Tensor, changes_B: Tensor) -> Tensor:
    """Multiply by 1 + change, which blends with black."""
    return _whole(images_BCYX * _per_image(1 + changes_B))


def color(images_BCYX: Tensor, changes_B: Tensor) -> Tensor:
    """Blend with the grey image."""
    return _blend(images_BCYX.float(), _grey(images_BCYX), changes_B)


def contrast(images_BCYX: Tensor, changes_B: Tensor) -> Tensor:
    """Blend with the mean of the grey image."""
    return _blend(images_BCYX.float(), _grey(images_BCYX).mean((1, 2, 3), keepdim=True), changes_B)


def sharpness(images_BCYX: Tensor, changes_B: Tensor) -> Tensor:
    """Blend with the smoothed image; the border is not smoothed."""
    pixels_BCYX = images_BCYX.float()
    sums_BCYX = pixels_BCYX[..., :-2, :] + pixels_BCYX[..., 1:-1, :] + pixels_BCYX[..., 2:, :]
    sums_BCYX = sums_BCYX[..., :-2] + sums_BCYX[..., 1:-1] + sums_BCYX[..., 2:]
    smooth_BCYX = pixels_BCYX.clone()
    # weights of 1 around a 5, over 13
    smooth_BCYX[..., 1:-1, 1:-1].mul_(4).add_(sums_BCYX).div_(13).round_()
    return _blend(pixels_BCYX, smooth_BCYX, changes_B)


def posterize(images_BCYX: Tensor, bits_B: Tensor) -> Tensor:
    """Keep the leading bits of every value."""
    dropped_B = 8 - bits_B.to(torch.uint8)
    masks_B = torch.full_like(dropped_B, 255) << dropped_B
    return images_BCYX & _per_image(masks_B)


def solarize(images_BCYX: Tensor, shares_B: Tensor) -> Tensor:
    """Invert values at or above a fraction of 255."""
    # with an integer threshold and XOR all values stay bytes: six times faster on a CPU than `torch.where`
    is_bright_BCYX = images_BCYX >= _per_image((shares_B * 255).ceil().to(torch.uint8))
    return images_BCYX ^ (is_bright_BCYX.to(torch.uint8) * 255)


def invert(images_BCYX: Tensor, _: Tensor) -> Tensor:
    """Return the negative."""
    return ~images_BCYX


def autocontrast(images_BCYX: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel to 0 to 255; a constant channel is unchanged."""
    pixels_BCYX = images_BCYX.float()
    low_BC11, high_BC11 = pixels_BCYX.amin((2, 3), keepdim=True), pixels_BCYX.amax((2, 3), keepdim=True)
    is_flat_BC11 = low_BC11 == high_BC11
    scale_BC11 = (high_BC11 - low_BC11).mul_(1 / 255).masked_fill_(is_flat_BC11, 1)
    return _whole((pixels_BCYX - low_BC11.masked_fill_(is_flat_BC11, 0)) / scale_BC11)


def equalize(images_BCYX: Tensor, _: Tensor) -> Tensor:
    """Equalise each channel's histogram by Pillow's integer rule; a channel with few pixels is unchanged."""
    values_BCP = images_BCYX.flatten(2).long()  # P pixels
    counts_BCV = torch.zeros(*values_BCP.shape[:2], 256, dtype=torch.int32, device=values_BCP.device)
    counts_BCV.scatter_add_(2, values_BCP, counts_BCV.new_ones(1).expand_as(values_BCP))
    highest_BC1 = values_BCP.amax(2, keepdim=True)
    step_BC1 = (values_BCP.shape[2] - counts_BCV.gather(2, highest_BC1)) // 255
    below_BCV = counts_BCV.cumsum(2, dtype=torch.int32) - counts_BCV
    table_BCV = ((below_BCV + step_BC1 // 2) // step_BC1.clamp(min=1)).clamp_(max=255)
    unchanged_V = torch.arange(256, dtype=torch.int32, device=values_BCP.device)
    table_BCV = torch.where(step_BC1 > 0, table_BCV, unchanged_V).to(torch.uint8)
    return table_BCV.gather(2, values_BCP).view_as(images_BCYX)


def _per_image(values_B: Tensor) -> Tensor:
    return values_B[:, None, None, None]


def _whole(pixels_BCYX: Tensor) -> Tensor:
    return pixels_BCYX.clamp_(0, 255).to(torch.uint8)


def _grey(images_BCYX: Tensor) -> Tensor:
    red, green, blue = images_BCYX.float().split(1, dim=1)
    return (red * GREY[0] + green * GREY[1] + blue * GREY[2]).floor_()


def _blend(pixels_BCYX: Tensor, others: Tensor, changes_B: Tensor) -> Tensor:
    """Extrapolate away from the other images by the change; negative values blend towards them, -1 equals them."""
    return _whole(pixels_BCYX + (pixels_BCYX - others) * _per_image(changes_B))


def _warp(
    images_BCYX: Tensor,
    *,
    x_x: Tensor | float = 1.0,
    x_y: Tensor | float = 0.0,
    x: Tensor | float = 0.0,
    y_x: Tensor | float = 0.0,
    y_y: Tensor | float = 1.0,
    y: Tensor | float = 0.0,
) -> Tensor:
    """Look up each pixel at column ``x_x * X + x_y * Y + x`` and row ``y_x * X + y_y * Y + y``, from the centre.

    The coefficients are [B, 1, 1], or scalars for all images.
    """
    batch, _, height, width = images_BCYX.shape
    X = torch.arange(width, device=images_BCYX.device) - (width - 1) / 2
    Y = torch.arange(height, device=images_BCYX.device)[:, None] - (height - 1) / 2
    columns, rows = x_x * X + x_y * Y + x, y_x * X + y_y * Y + y
    grid = torch.stack([(columns * (2 / width)).expand(batch, -1, -1), (rows * (2 / height)).expand(batch, -1, -1)], -1)
    return F.grid_sample(images_BCYX.float(), grid, "nearest", "zeros", align_corners=False).to(torch.uint8)
