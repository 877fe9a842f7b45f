"""Augmentation of training batches on their device, after any loader."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from common.data.colors import COLOR_UNIFORMS, augment_colors
from common.data.erasing import ERASING_UNIFORMS, erase
from common.data.loader import Loader, TrainLoader
from common.data.mixup import Blend, Blended
from common.data.sampler import COLORS, ERASING, TrainSampler, sample_uniforms


@dataclass(frozen=True)
class Change:
    """An augmentation of single images: ``apply`` changes a batch in place by random numbers."""

    purpose: int  # what its random numbers are drawn for: COLORS or ERASING of the sampler
    uniforms: int  # random numbers for each image
    apply: Callable[[Tensor, np.ndarray], None]


def build_changes(config: Mapping[str, Any]) -> list[Change]:
    """Return the augmentations of single images that the config turns on, in their order."""
    changes = []
    if config["THREE_AUGMENT"] or config["COLOR_JITTER"]:
        change_colors = partial(
            augment_colors,
            three_augment=config["THREE_AUGMENT"],
            jitter=config["COLOR_JITTER"],
            mean=config["DATA"]["mean"],
            std=config["DATA"]["std"],
        )
        changes.append(Change(COLORS, COLOR_UNIFORMS, change_colors))
    if config["ERASING"]:
        change = partial(erase, probability=config["ERASING"], mode=config["ERASING_MODE"])
        changes.append(Change(ERASING, ERASING_UNIFORMS, change))
    return changes


class BatchAugment(TrainLoader):
    """Change a training loader's images, then blend them, in place, as the config's keys say.

    The labels of blended images become the arguments of `MixupLoss` beside the logits. The last
    ``MIXUP_OFF_EPOCHS`` epochs are not blended.

    All draws are pure functions of the seed, the loader's position and, for blending, the rank, so
    that a resumed run draws the same.
    """

    def __init__(self, loader: Loader, config: Mapping[str, Any]) -> None:
        assert isinstance(loader.sampler, TrainSampler)
        self.loader = loader
        self.sampler = loader.sampler
        self.seed = config["SEED"]
        self.changes = build_changes(config)
        self.blend = Blend(config["MIXUP"], config["CUTMIX"])
        self.blends = bool(config["MIXUP"] or config["CUTMIX"])
        self.last_epochs = config["MIXUP_OFF_EPOCHS"]
        self.blended_epochs = config["NUM_EPOCHS"] - self.last_epochs

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Blended]:
        batches = iter(self.loader)
        # `iter` above has set the position to the start of this pass.
        state = self.loader.state_dict()
        epoch = state["epoch"]
        # A range test may be longer than the training: without last epochs all are blended.
        blends = self.blends and not (self.last_epochs and epoch >= self.blended_epochs)
        # The state counts the samples of all ranks.
        local_sample = state["samples"] // self.sampler.dp_size
        for images, labels in batches:
            step, row = self.sampler.position(local_sample)
            for change in self.changes:
                uniforms = sample_uniforms(
                    self.seed, epoch, step, row, len(images), change.uniforms, change.purpose
                )
                change.apply(images, uniforms)
            seed = [self.seed, epoch, local_sample // len(images), self.sampler.dp_rank]
            local_sample += len(images)
            yield self.blend(images, labels, seed) if blends else (images, labels)

    def state_dict(self) -> dict[str, int]:
        """Return the loader's position, as `Loader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from a position, as `Loader.load_state_dict`."""
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """Close the loader."""
        self.loader.close()
