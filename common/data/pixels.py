"""From a decoded image to the network's input: crop, resize as Pillow does, normalise."""

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from common.data.crops import Crop, Crops, reflected

NONE_RANDOM = np.empty((1, 0))


def crop_image(image: np.ndarray, crop: Crop, size: int, uniforms: np.ndarray = NONE_RANDOM) -> np.ndarray:
    """Return the crop of an image, uint8 [Y, X, 3], as [``size``, ``size``, 3]; ``uniforms`` is [1, K]."""
    crops = crop(np.array([image.shape[0]]), np.array([image.shape[1]]), uniforms)
    top, left, height, width = *crops.start[0].tolist(), *crops.shape[0].tolist()
    return resample(image[top : top + height, left : left + width], crops, 0, size, crop.interpolation)


def resample(window: np.ndarray, crops: Crops, row: int, size: int, interpolation: str) -> np.ndarray:
    """Resample the region of a decoded window, uint8 [Y, X, 3], that ``crops`` has for an image; move and mirror it."""
    region = *crops.region_start[row].tolist(), *crops.region_end[row].tolist()
    if region == (0, 0, *window.shape[:2]):
        # Pillow's arithmetic in a third of its time, but with no region
        window_1CYX = torch.from_numpy(window).permute(2, 0, 1)[None]
        view = F.interpolate(window_1CYX, (size, size), mode=interpolation, antialias=True)[0].permute(1, 2, 0).numpy()
    else:
        top, left, bottom, right = region
        box, filter_ = (left, top, right, bottom), Image.Resampling[interpolation.upper()]
        view = np.asarray(Image.fromarray(window).resize((size, size), filter_, box))
    if crops.shift[row].any():
        view = view[np.ix_(*reflected(size, crops.shift[row]))]
    return view[:, ::-1] if crops.flip[row] else view


def per_channel(values: Sequence[float], device: torch.device) -> Tensor:
    """Return a value for each of R, G and B (0 to 1) as a tensor [3, 1, 1] of their scale in images (0 to 255)."""
    return torch.tensor(values, device=device)[:, None, None] * 255


class Normalizer:
    """Normalise images to the network's input, (pixel - mean) / std, float32 [B, 3, Y, X]."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        self.mean, self.std = (per_channel(values, device) for values in (mean, std))
        self._free: list[np.ndarray] = []

    def __call__(self, images_BHWC: Tensor) -> Tensor:
        """Return uint8 images [B, Y, X, 3], which are on the device, normalised."""
        if not images_BHWC.is_cpu:
            return images_BHWC.permute(0, 3, 1, 2).contiguous().float().sub_(self.mean).div_(self.std)
        batch, height, width, channels = images_BHWC.shape
        normalized = self.empty(batch, channels, height, width)
        for image, out in zip(images_BHWC.numpy(), normalized.numpy(), strict=True):
            self.write(image, out)
        return normalized

    def write(self, image: np.ndarray, out: np.ndarray) -> None:
        """Write an image, uint8 [Y, X, 3], normalised into ``out``, float32 [3, Y, X]."""
        # channel by channel in the cache: a third of the time of PyTorch's operations on the batch
        for channel, plane in enumerate(out):
            np.subtract(image[..., channel], self.mean[channel].numpy(), out=plane)
            plane /= self.std[channel].numpy()

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialised float32 tensor in the memory of an earlier one that is not used any more.

        Fresh memory takes as long as resizing: the kernel clears each page at its first use.
        """
        memory = self._free.pop() if self._free else np.empty(0, np.float32)
        if memory.shape != shape:
            memory = np.empty(shape, np.float32)
        array = memory.view()  # held by the tensor's storage, hence alive as long as any tensor that shares it
        weakref.finalize(array, self._free.append, memory).atexit = False
        return torch.from_numpy(array)
