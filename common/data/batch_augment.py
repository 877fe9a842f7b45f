"""Augmentation of training batches on their device, after any loader, and the loss that goes with
it.

Colours: 3-Augment (DeiT III, arXiv 2204.07118) and colour jitter. Random erasing (arXiv
1708.04896). Mixup (Zhang et al., arXiv 1710.09412) and CutMix (Yun et al., arXiv 1905.04899).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.data.crops import CROP_UNIFORMS, RandomCrop
from common.data.loader import Loader, to_device
from common.data.sampler import COLORS, ERASING, TrainSampler, sample_uniforms

RADIUS = 8  # of the blur's kernel: four times the largest sigma
COLOR_UNIFORMS = 5
# area and aspect ratio of the erased rectangle, as in torchvision and timm
ERASED = RandomCrop(scale=(0.02, 1 / 3), ratio=(0.3, 3.3))
ERASING_UNIFORMS = CROP_UNIFORMS + 1

Blended = tuple[
    Tensor, Tensor | dict[str, Tensor]
]  # images, and labels or the arguments of `MixupLoss`


def augment_colors(config: Mapping[str, Any], images: Tensor, uniforms: np.ndarray) -> None:
    """Change the colours of normalised ``images`` [B, 3, Y, X] in place; ``uniforms`` are [B,
    `COLOR_UNIFORMS`].

    With ``THREE_AUGMENT`` an image is made grey, solarised or blurred, each for a third of the
    images. Then its brightness, contrast and saturation are multiplied by factors that are at most
    ``COLOR_JITTER`` from 1, clipped once at the end. Values are rounded to 8 bits. DeiT's own code
    differs by rounding, by Pillow's approximation of the Gaussian, and by clipping between the
    jitter's three operations, whose order is otherwise without effect.
    """
    scale = (np.array(config["DATA"][key])[:, None, None] * 255 for key in ("mean", "std"))
    mean_C11, std_C11 = (to_device(values.astype(np.float32), images.device) for values in scale)
    pixels = images.mul_(std_C11).add_(mean_C11).round_()
    for number, change in enumerate((grey, solarise, blur) if config["THREE_AUGMENT"] else ()):
        (rows,) = np.nonzero(np.floor(3 * uniforms[:, 0]) == number)
        if len(rows):
            place, sigmas = to_device(rows, images.device), 0.1 + 1.9 * uniforms[rows, 1]
            pixels[place] = change(pixels[place], sigmas)
    if jitter := config["COLOR_JITTER"]:
        factors = to_device(
            (1 + jitter * (2 * uniforms[:, 2:] - 1)).astype(np.float32), images.device
        )
        pixels.copy_(adjust(pixels, *factors.T[..., None, None, None]).round_())
    pixels.sub_(mean_C11).div_(std_C11)


def grey(pixels: Tensor, _: np.ndarray) -> Tensor:
    """Return images of 0 to 255 without their colours."""
    return luma(pixels).expand_as(pixels)


def solarise(pixels: Tensor, _: np.ndarray) -> Tensor:
    """Return images of 0 to 255 whose upper half of values is inverted."""
    return torch.where(pixels >= 128, 255 - pixels, pixels)


def blur(pixels: Tensor, sigmas: np.ndarray) -> Tensor:
    """Return images [B, 3, Y, X], each blurred by a Gaussian of its sigma [B] and rounded; their
    edge is repeated.
    """
    kernels = np.exp(-0.5 * (np.arange(-RADIUS, RADIUS + 1) / sigmas[:, None]) ** 2)
    kernels = np.repeat(kernels / kernels.sum(1, keepdims=True), 3, axis=0).astype(np.float32)
    weight = to_device(kernels[:, None, None], pixels.device)
    planes = F.pad(pixels, (RADIUS,) * 4, mode="replicate").flatten(0, 1)
    planes = F.conv2d(F.conv2d(planes, weight, groups=len(weight)), weight.mT, groups=len(weight))
    return planes.view_as(pixels).round_()


def adjust(pixels: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Return images of 0 to 255 with those factors applied."""
    grey_level = luma(pixels)
    average = grey_level.mean((1, 2, 3), keepdim=True)
    pixels = torch.lerp(average, torch.lerp(grey_level, pixels, saturation), contrast)
    return (brightness * pixels).clamp_(0, 255)


def luma(pixels: Tensor) -> Tensor:
    """Return the rounded luma of ITU-R 601 [B, 1, Y, X], as Pillow."""
    red, green, blue = pixels.split(1, dim=1)
    return (0.299 * red + 0.587 * green + 0.114 * blue).round_()


def erase(config: Mapping[str, Any], images: Tensor, uniforms: np.ndarray) -> None:
    """Set a rectangle of some ``images`` [B, 3, Y, X] to 0, the mean, by ``uniforms`` [B,
    `ERASING_UNIFORMS`].

    In the mode "pixel" it becomes normal noise instead, drawn once a batch.
    """
    batch, _, height, width = images.shape
    crops = ERASED(np.full((batch, 2), (height, width)), uniforms)
    erased = uniforms[:, CROP_UNIFORMS] < config["ERASING"]
    start_B2, stop_B2 = (
        to_device(corner, images.device)
        for corner in (crops.start, np.where(erased[:, None], crops.start + crops.shape, 0))
    )
    rows_BY, columns_BX = (
        (start_B2[:, dim : dim + 1] <= place) & (place < stop_B2[:, dim : dim + 1])
        for dim, place in enumerate(
            torch.arange(size, device=images.device) for size in (height, width)
        )
    )
    erased_B1YX = (rows_BY[:, :, None] & columns_BX[:, None])[:, None]
    if config["ERASING_MODE"] == "const":
        images.masked_fill_(erased_B1YX, 0)
    else:
        generator = torch.Generator(images.device).manual_seed(
            int(uniforms[0, CROP_UNIFORMS - 1] * 2**53)
        )
        noise = torch.randn(images.shape, generator=generator, device=images.device)
        images.copy_(torch.where(erased_B1YX, noise, images))


def cut_and_paste(
    images: Tensor, labels: Tensor, share: float, center: tuple[float, float]
) -> Blended:
    """CutMix: copy one box from sample B-1-i into sample i, in place.

    The box has the aspect ratio of the image and the fraction ``1 - share`` of its area. It is
    centred at `center` (y, x from 0 to 1) and clipped to the image; the label weights follow the
    clipped area.
    """
    height, width = images.shape[-2:]
    top, bottom = _span(height, share, center[0])
    left, right = _span(width, share, center[1])
    images[..., top:bottom, left:right] = images[..., top:bottom, left:right].flip(0)
    return images, _two_labels(labels, 1 - (bottom - top) * (right - left) / (height * width))


def _span(size: int, share: float, center: float) -> tuple[int, int]:
    length = int(size * math.sqrt(1 - share))
    start = int(size * center) - length // 2
    return max(start, 0), min(start + length, size)


def _two_labels(labels: Tensor, share: float) -> dict[str, Tensor]:
    # filled on the device: no transfer from the host
    return {
        "target": labels,
        "other": labels.flip(0),
        "share": torch.full((), share, device=labels.device),
    }


# Augmentations of single images, in their order: the keys that turn one on, the kind of its draws,
# how many numbers it takes for each image, and what changes a batch in place.
CHANGES = (
    (("THREE_AUGMENT", "COLOR_JITTER"), COLORS, COLOR_UNIFORMS, augment_colors),
    (("ERASING",), ERASING, ERASING_UNIFORMS, erase),
)


class BatchAugment:
    """Change a training loader's images, then blend them with one another, in place, as the
    config's keys say.

    ``MIXUP`` and ``CUTMIX`` are the alphas of the Beta distributions that the share of the first
    image is drawn from, once a micro-batch; if both are above 0, each is used for half of the
    micro-batches, as in timm. The labels of blended images become the arguments of `MixupLoss`
    beside the logits.

    All draws are pure functions of the seed, the loader's position and, for blending, the rank, so
    that a resumed run draws the same.
    """

    def __init__(self, loader: Loader, config: Mapping[str, Any]) -> None:
        self.loader, self.config = loader, config
        self.seed, self.mixup, self.cutmix = (config[key] for key in ("SEED", "MIXUP", "CUTMIX"))
        self.blended_epochs = config["NUM_EPOCHS"] - config["MIXUP_OFF_EPOCHS"]

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Blended]:
        batches, sampler = iter(self.loader), self.loader.sampler
        assert isinstance(sampler, TrainSampler)
        start = self.loader.state_dict()
        for number, (images, labels) in enumerate(batches, start["samples"] // sampler.stride):
            for keys, kind, count, change in CHANGES:
                if any(self.config[key] for key in keys):
                    place = *sampler.place(number), sampler.micro_batch
                    change(
                        self.config,
                        images,
                        sample_uniforms(self.seed, start["epoch"], *place, count, kind),
                    )
            yield self._blend(images, labels, start["epoch"], number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)  # its position, and close

    def _blend(self, images: Tensor, labels: Tensor, epoch: int, number: int) -> Blended:
        if not (self.mixup or self.cutmix) or (
            self.config["MIXUP_OFF_EPOCHS"] and epoch >= self.blended_epochs
        ):
            return images, labels
        random = np.random.default_rng([self.seed, epoch, number, self.loader.sampler.dp_rank])
        choice, *center = random.random(3)
        cuts = choice < 0.5 if self.mixup and self.cutmix else bool(self.cutmix)
        if cuts:
            return cut_and_paste(
                images, labels, random.beta(self.cutmix, self.cutmix), tuple(center)
            )
        share = random.beta(self.mixup, self.mixup)
        images.lerp_(images.flip(0), 1 - share)  # share * x[i] + (1 - share) * x[B-1-i]
        return images, _two_labels(labels, share)


class MixupLoss(nn.Module):
    """Loss against the two weighted labels of a mixed image, in float32.

    Cross-entropy against the weighted one-hot labels. With ``bce_threshold``: binary cross-entropy,
    averaged over the classes or with ``bce_sum`` summed, with target 1 for classes whose weight
    exceeds it (DeiT III, arXiv 2204.07118), or with "soft" against the smoothed weights.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        bce_threshold: float | str | None = None,
        bce_sum: bool = False,
    ) -> None:
        super().__init__()
        self.label_smoothing, self.bce_threshold, self.bce_sum = (
            label_smoothing,
            bce_threshold,
            bce_sum,
        )

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        other: Tensor | None = None,
        share: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss of `logits` [B, num_classes]; labels of -100 are ignored, and the
        mean of none is 0.
        """
        labels = (
            [(target, 1.0)]
            if other is None or share is None
            else [(target, share), (other, 1 - share)]
        )
        if self.bce_threshold is not None:
            return self._binary_cross_entropy(logits.float(), labels)
        loss, *others = (self._cross_entropy(logits.float(), label) for label, _ in labels)
        return torch.lerp(others[0], loss, labels[0][1]) if others else loss

    def _cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(
            logits, target, label_smoothing=self.label_smoothing, reduction="sum"
        )
        return loss / (target >= 0).sum().clamp(min=1)

    def _binary_cross_entropy(self, logits: Tensor, labels: list[tuple[Tensor, Any]]) -> Tensor:
        valid, blend = labels[0][0] >= 0, torch.zeros_like(logits)
        for label, share in labels:
            blend.scatter_add_(
                1, label.clamp(min=0)[:, None], (share * (label >= 0).float())[:, None]
            )
        if isinstance(self.bce_threshold, float | int):
            blend = (blend > self.bce_threshold).float()
        else:
            blend = torch.lerp(
                blend, torch.full_like(blend, 1 / blend.shape[1]), self.label_smoothing
            )
        losses = F.binary_cross_entropy_with_logits(logits, blend, reduction="none")
        losses = losses.sum(1) if self.bce_sum else losses.mean(1)
        return (losses * valid).sum() / valid.sum().clamp(min=1)
