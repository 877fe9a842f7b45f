"""Mixup (Zhang et al., arXiv 1710.09412), CutMix (Yun et al., arXiv 1905.04899), and the loss that goes with both."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mix(images: Tensor, labels: Tensor, share: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Blend `images` [B, 3, H, W] in place, `share` of each and the rest of its mirror image in the batch's order.

    The labels become the arguments of `MixupLoss` beside the logits.
    """
    images.lerp_(images.flip(0), 1 - share)
    return images, _two_labels(labels, share)


def cut_and_paste(
    images: Tensor, labels: Tensor, share: float, center: tuple[float, float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Paste one rectangle of its mirror image in the batch's order into each of `images` [B, 3, H, W], in place.

    The rectangle has the shape of the image and ``1 - share`` of its area, `center` (y, x as shares of the image) is
    where its middle lies, and what reaches beyond the image is cut off. The share that the labels get is of the area.
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
    # filled on the device: a number from the host would be one more transfer
    share_on_device = torch.full((), share, dtype=torch.float32, device=labels.device)
    return {"target": labels, "other": labels.flip(0), "share": share_on_device}


class MixupLoss(nn.Module):
    """Loss against the two labels of a blended image, each with its share, in fp32.

    Cross-entropy against the blend of the two one-hot labels, or with ``bce_threshold`` binary cross-entropy, averaged
    over the classes, where those with a larger share of the blend are on (DeiT III, arXiv 2204.07118).
    """

    def __init__(self, label_smoothing: float = 0.0, bce_threshold: float | None = None) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing={label_smoothing} must be at least 0 and below 1")
        self.label_smoothing, self.bce_threshold = label_smoothing, bce_threshold

    def forward(
        self, logits: Tensor, target: Tensor, other: Tensor | None = None, share: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss of `logits` [B, num_classes]; labels of -100 count for nothing, and their mean is 0."""
        if self.bce_threshold is not None:
            return self._binary_cross_entropy(logits.float(), target, other, share)
        loss = self._cross_entropy(logits, target)
        if other is None:
            return loss
        assert share is not None
        return torch.lerp(self._cross_entropy(logits, other), loss, share)

    def _cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor:
        options: dict[str, Any] = dict(label_smoothing=self.label_smoothing, reduction="sum")
        return F.cross_entropy(logits.float(), target, **options) / (target >= 0).sum().clamp(min=1)

    def _binary_cross_entropy(
        self, logits: Tensor, target: Tensor, other: Tensor | None, share: Tensor | None
    ) -> Tensor:
        assert self.bce_threshold is not None
        valid, blend = target >= 0, torch.zeros_like(logits)
        shares = [(target, 1.0)] if other is None or share is None else [(target, share), (other, 1 - share)]
        for labels, part in shares:
            blend.scatter_add_(1, labels.clamp(min=0)[:, None], (part * (labels >= 0).float())[:, None])
        losses = F.binary_cross_entropy_with_logits(logits, (blend > self.bce_threshold).float(), reduction="none")
        return (losses.mean(1) * valid).sum() / valid.sum().clamp(min=1)
