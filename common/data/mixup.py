"""Mixup (Zhang et al., arXiv 1710.09412), CutMix (Yun et al., arXiv 1905.04899), and the loss that goes with both."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mix(images: Tensor, labels: Tensor, share: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Mix sample i with sample B-1-i in place: share * x[i] + (1 - share) * x[B-1-i].

    Returns `images` [B, 3, H, W] and the keyword arguments of `MixupLoss`.
    """
    images.lerp_(images.flip(0), 1 - share)
    return images, _two_labels(labels, share)


def cut_and_paste(
    images: Tensor, labels: Tensor, share: float, center: tuple[float, float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """CutMix: copy one box from sample B-1-i into sample i, in place.

    The box has the aspect ratio of the image and the fraction ``1 - share`` of its area. It is centred at `center`
    (y, x from 0 to 1) and clipped to the image; the label weights follow the clipped area.
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
    share_on_device = torch.full((), share, dtype=torch.float32, device=labels.device)
    return {"target": labels, "other": labels.flip(0), "share": share_on_device}


class MixupLoss(nn.Module):
    """Loss against the two weighted labels of a mixed image, in fp32.

    Cross-entropy against the weighted one-hot labels. With ``bce_threshold``: binary cross-entropy, averaged over the
    classes, with target 1 for classes whose weight exceeds it (DeiT III, arXiv 2204.07118).
    """

    def __init__(self, label_smoothing: float = 0.0, bce_threshold: float | None = None) -> None:
        super().__init__()
        self.label_smoothing, self.bce_threshold = label_smoothing, bce_threshold

    def forward(
        self, logits: Tensor, target: Tensor, other: Tensor | None = None, share: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss of `logits` [B, num_classes]; labels of -100 are ignored, and the mean of none is 0."""
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
