"""Blending the images of a batch in pairs, and the loss against two weighted labels.

Mixup (Zhang et al., arXiv 1710.09412) and CutMix (Yun et al., arXiv 1905.04899). Image i is blended
with image B-1-i, as in timm.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Images, and their labels. Blended images have the arguments of `MixupLoss` beside the logits.
Blended = tuple[Tensor, Tensor | dict[str, Tensor]]


@dataclass(frozen=True)
class Blend:
    """Blend micro-batches by Mixup or CutMix.

    ``mixup`` and ``cutmix`` are the alphas of the Beta distributions from which ``lam``, the weight
    of the first image, is drawn once a micro-batch. If both are above 0, each is used for half of
    the micro-batches, as in timm.
    """

    mixup: float
    cutmix: float

    def __call__(self, images: Tensor, labels: Tensor, seed: list[int]) -> Blended:
        """Blend ``images`` [B, C, Y, X] in place; ``seed`` are numbers unique to the batch."""
        random = np.random.default_rng(seed)
        # Drawn whether needed or not: `lam` is always the fourth number.
        choice, *center = random.random(3)
        cuts = bool(self.cutmix)
        if self.mixup and self.cutmix:
            cuts = choice < 0.5
        if cuts:
            lam = random.beta(self.cutmix, self.cutmix)
            return cut_and_paste(images, labels, lam, tuple(center))
        lam = random.beta(self.mixup, self.mixup)
        images.lerp_(images.flip(0), 1 - lam)  # lam * x[i] + (1 - lam) * x[B-1-i]
        return images, _two_labels(labels, lam)


def cut_and_paste(
    images: Tensor, labels: Tensor, lam: float, center: tuple[float, float]
) -> Blended:
    """Copy one box from image B-1-i into image i, in place (CutMix).

    The box has the aspect ratio of the image and the fraction ``1 - lam`` of its area. It is
    centred at ``center`` (y, x in [0, 1)) and clipped to the image; the weights of the labels
    follow the clipped area.
    """
    height, width = images.shape[-2:]
    top, bottom = _span(height, lam, center[0])
    left, right = _span(width, lam, center[1])
    box = images[..., top:bottom, left:right]
    # `flip` copies, so that both images of a pair get the other's original box.
    box.copy_(box.flip(0))
    pasted_area = (bottom - top) * (right - left)
    return images, _two_labels(labels, 1 - pasted_area / (height * width))


def _span(size: int, lam: float, center: float) -> tuple[int, int]:
    """Return where the box starts and ends along a side of ``size`` pixels."""
    # Both sides are scaled by this root: the area then is 1 - lam of the image's.
    length = int(size * math.sqrt(1 - lam))
    start = int(size * center) - length // 2
    # A box that is cut at the edge is smaller: its labels' weights follow it.
    return max(start, 0), min(start + length, size)


def _two_labels(labels: Tensor, lam: float) -> dict[str, Tensor]:
    """Return the arguments of `MixupLoss` beside the logits."""
    # filled on the device: no transfer from the host
    lam_tensor = torch.full((), lam, device=labels.device)
    return {"target": labels, "other": labels.flip(0), "lam": lam_tensor}


class MixupLoss(nn.Module):
    """Loss against the two weighted labels of a blended image, in float32.

    Cross-entropy against the weighted one-hot labels. With ``bce_threshold``: binary cross-entropy,
    averaged over the classes or with ``bce_sum`` summed, with target 1 for classes whose weight
    exceeds it (DeiT III, arXiv 2204.07118), or with "soft" against the smoothed weights.

    With ``class_weights`` [num_classes], cross-entropy is that of PyTorch with ``weight``: the term
    of each class has its weight. In binary cross-entropy all terms of an image have the weights of
    its labels, by their shares. The mean is over the images, as PyTorch's for class probabilities,
    and not over their weights, so that it does not depend on how a batch is cut.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        bce_threshold: float | str | None = None,
        bce_sum: bool = False,
        class_weights: Tensor | None = None,
    ):
        super().__init__()
        self.label_smoothing = label_smoothing
        self.bce_threshold = bce_threshold
        self.bce_sum = bce_sum
        self.class_weights = class_weights

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        other: Tensor | None = None,
        lam: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss of ``logits`` [B, num_classes].

        ``target`` and ``other`` are int64 [B], ``lam`` the weight of ``target``. Labels of -100
        are ignored; the mean of none is 0.
        """
        if self.bce_threshold is not None:
            labels: list[tuple[Tensor, Any]] = [(target, 1.0)]
            if other is not None and lam is not None:
                labels = [(target, lam), (other, 1 - lam)]
            return self._binary_cross_entropy(logits.float(), labels)
        loss = self._cross_entropy(logits.float(), target)
        if other is None or lam is None:
            return loss
        # cross-entropy is linear in the target: blending losses is blending targets
        return torch.lerp(self._cross_entropy(logits.float(), other), loss, lam)

    def _cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean over the valid labels; PyTorch's own mean of none is NaN."""
        loss = F.cross_entropy(
            logits,
            target,
            self.class_weights,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        return loss / (target >= 0).sum().clamp(min=1)

    def _binary_cross_entropy(self, logits: Tensor, labels: list[tuple[Tensor, Any]]) -> Tensor:
        """Return the loss against labels [B] of the given weights."""
        is_valid_B = labels[0][0] >= 0
        target_BK = torch.zeros_like(logits)  # K classes
        for label, lam in labels:
            # padding has no class, but an index that scatter_add_ takes
            weight_B = lam * (label >= 0).float()
            target_BK.scatter_add_(1, label.clamp(min=0)[:, None], weight_B[:, None])
        # Before the threshold below makes targets of 1 of the shares.
        weights_B = is_valid_B.float()
        if self.class_weights is not None:
            weights_B = (target_BK * self.class_weights).sum(1)
        if isinstance(self.bce_threshold, float | int):
            target_BK = (target_BK > self.bce_threshold).float()
        else:
            uniform_BK = torch.full_like(target_BK, 1 / target_BK.shape[1])
            target_BK = torch.lerp(target_BK, uniform_BK, self.label_smoothing)
        losses_BK = F.binary_cross_entropy_with_logits(logits, target_BK, reduction="none")
        losses_B = losses_BK.sum(1) if self.bce_sum else losses_BK.mean(1)
        return (losses_B * weights_B).sum() / is_valid_B.sum().clamp(min=1)
