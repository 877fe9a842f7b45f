"""Augmentation of training batches on their device: colours, random erasing, then Mixup or CutMix."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.data.color_augment import UNIFORMS_PER_SAMPLE as UNIFORMS_PER_COLORS
from common.data.color_augment import ColorAugment
from common.data.crops import UNIFORMS_PER_SAMPLE as UNIFORMS_PER_CROP
from common.data.crops import RandomCrop
from common.data.loader import Loader
from common.data.micro_batches import COLORS, ERASING, TrainSampler, sample_uniforms
from common.data.mixup import cut_and_paste, mix

# area and aspect ratio of the erased rectangle, as in torchvision and timm
ERASED = RandomCrop(scale=(0.02, 1 / 3), ratio=(0.3, 3.3), flip=False)
UNIFORMS_PER_SAMPLE = UNIFORMS_PER_CROP + 1


class BatchAugment:
    """Change the colours of a training loader's images, erase from them, then blend them with one another, in place.

    ``erasing`` is the probability that a rectangle of an image is set to 0, the mean colour (arXiv 1708.04896).
    ``mixup`` and ``cutmix`` are the alphas of the Beta distributions that the share of the first image is drawn from,
    once a micro-batch; if both are above 0, each is used for half of the micro-batches, as in timm. The labels of
    blended images become the arguments of `MixupLoss` beside the logits. 0 turns each of them off.

    All draws are pure functions of ``seed``, the loader's position and, for blending, the rank, so that a resumed run
    draws the same.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        mixup: float,
        cutmix: float,
        erasing: float,
        seed: int,
        colors: ColorAugment | None = None,
    ) -> None:
        self.loader, self.mixup, self.cutmix, self.erasing, self.seed = loader, mixup, cutmix, erasing, seed
        self.colors = colors

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | dict[str, Tensor]]]:
        batches = iter(self.loader)
        start = self.loader.state_dict()
        first = start["samples"] // self.loader.sampler.stride
        for number, (images, labels) in enumerate(batches, first):
            if self.colors:
                self.colors(images, self._uniforms(start["epoch"], number, UNIFORMS_PER_COLORS, COLORS))
            if self.erasing:
                erase(images, self._uniforms(start["epoch"], number, UNIFORMS_PER_SAMPLE, ERASING), self.erasing)
            yield self._blend(images, labels, start["epoch"], number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)  # its position, failure and close

    def _uniforms(self, epoch: int, number: int, count: int, kind: int) -> np.ndarray:
        sampler = self.loader.sampler
        assert isinstance(sampler, TrainSampler)
        return sample_uniforms(self.seed, epoch, *sampler.place(number), sampler.micro_batch, count, kind)

    def _blend(
        self, images: Tensor, labels: Tensor, epoch: int, number: int
    ) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
        if not (self.mixup or self.cutmix):
            return images, labels
        random = np.random.default_rng([self.seed, epoch, number, self.loader.sampler.dp_rank])
        choice, *center = random.random(3)
        cuts = choice < 0.5 if self.mixup and self.cutmix else bool(self.cutmix)
        if cuts:
            return cut_and_paste(images, labels, random.beta(self.cutmix, self.cutmix), tuple(center))
        return mix(images, labels, random.beta(self.mixup, self.mixup))


def build_batch_augment(loader: Loader, config: Mapping[str, Any]) -> BatchAugment:
    """Return ``loader`` with the augmentations that the config's keys turn on."""
    colors = ColorAugment(
        config["THREE_AUGMENT"], config["COLOR_JITTER"], config["DATA"]["mean"], config["DATA"]["std"]
    )
    blends = dict(mixup=config["MIXUP"], cutmix=config["CUTMIX"], erasing=config["ERASING"])
    return BatchAugment(loader, **blends, colors=colors, seed=config["SEED"])


def erase(images: Tensor, uniforms: np.ndarray, probability: float) -> None:
    """Set a rectangle of some of `images` [B, 3, Y, X] to 0, as ``uniforms`` [B, `UNIFORMS_PER_SAMPLE`] say."""
    batch, _, height, width = images.shape
    crops = ERASED(np.full(batch, height), np.full(batch, width), uniforms)
    erased = uniforms[:, UNIFORMS_PER_CROP] < probability
    start_B2, stop_B2 = (
        torch.from_numpy(corner).to(images.device, non_blocking=True)
        for corner in (crops.start, np.where(erased[:, None], crops.start + crops.shape, 0))
    )
    rows_BY, columns_BX = (
        (start_B2[:, [dim]] <= place) & (place < stop_B2[:, [dim]])
        for dim, place in enumerate(torch.arange(size, device=images.device) for size in (height, width))
    )
    images.masked_fill_((rows_BY[:, :, None] & columns_BX[:, None])[:, None], 0)
