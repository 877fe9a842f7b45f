"""Mixup (Zhang et al., arXiv 1710.09412) on the device, and the loss that goes with it."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.errors import UserError
from common.loader import Loader


class Mixup:
    """Blend each image of a training loader with the one at the mirrored place of its micro-batch, in place.

    The share of the first image is drawn from Beta(alpha, alpha) once a micro-batch, as a pure function of `seed`, the
    loader's position and the rank: a resumed run draws what the uninterrupted one would have. Labels become the
    arguments of `MixupLoss` beside the logits; with alpha 0 images and labels stay as they are.
    """

    def __init__(self, loader: Loader, alpha: float, seed: int) -> None:
        if not alpha >= 0:
            raise UserError(f"MIXUP={alpha} must be at least 0, which turns it off")
        self.loader, self.alpha, self.seed = loader, alpha, seed

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | dict[str, Tensor]]]:
        for images, labels in self.loader:
            yield (images, labels) if self.alpha == 0 else mix(images, labels, self._draw_share())

    def state_dict(self) -> dict[str, int]:
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.loader.load_state_dict(state)

    def close(self) -> None:
        self.loader.close()

    def _draw_share(self) -> float:
        position = self.loader.state_dict()
        words = [self.seed, position["epoch"], position["samples"], self.loader.sampler.dp_rank]
        return np.random.default_rng(words).beta(self.alpha, self.alpha)


def mix(images: Tensor, labels: Tensor, share: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Blend `images` [B, 3, H, W] in place, `share` of each and the rest of its mirror image in the batch's order."""
    images.lerp_(images.flip(0), 1 - share)
    # filled on the device: a number from the host would be one more transfer
    share_on_device = torch.full((), share, dtype=torch.float32, device=images.device)
    return images, {"target": labels, "other": labels.flip(0), "share": share_on_device}


class MixupLoss(nn.Module):
    """Cross-entropy against the two labels of a blended image, each with its share, in fp32.

    It equals cross-entropy against the blend of the two one-hot labels. Without a second label it is plain
    cross-entropy.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise UserError(f"LABEL_SMOOTHING={label_smoothing} must be at least 0 and below 1")
        self.label_smoothing = label_smoothing

    def forward(
        self, logits: Tensor, target: Tensor, other: Tensor | None = None, share: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss of `logits` [B, num_classes]; labels of -100 count for nothing, and their mean is 0."""
        loss = self._cross_entropy(logits, target)
        return loss if other is None else torch.lerp(self._cross_entropy(logits, other), loss, share)

    def _cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor:
        options = dict(label_smoothing=self.label_smoothing, reduction="sum")
        return F.cross_entropy(logits.float(), target, **options) / (target >= 0).sum().clamp(min=1)
