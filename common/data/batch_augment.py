"""Augmentation of training batches on their device, after any loader."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from common.data.colors import COLOR_UNIFORMS, augment_colors
from common.data.erasing import ERASING_UNIFORMS, erase
from common.data.mixup import Blend, Blended
from common.data.sampler import COLORS, ERASING, TrainSampler, sample_uniforms


@dataclass(frozen=True)
class BatchAugment:
    """Change a training batch's images, then blend them, in place; the ``augment`` of a `Loader`.

    The labels of blended images become the arguments of `MixupLoss` beside the logits. The last
    ``mixup_off_epochs`` of ``num_epochs`` are not blended.

    All draws are pure functions of the seed, the batch's position and, for blending, the rank, so
    that a resumed run draws the same.
    """

    seed: int
    mean: Sequence[float]
    std: Sequence[float]
    _: KW_ONLY
    three_augment: bool = False
    color_jitter: float = 0.0
    erasing: float = 0.0
    erasing_mode: str = "const"
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_off_epochs: int = 0
    num_epochs: int = 0

    def __call__(
        self, images: Tensor, labels: Tensor, sampler: TrainSampler, epoch: int, local_sample: int
    ) -> Blended:
        """Return the batch of ``epoch`` that begins at ``local_sample`` of the rank's samples."""
        step, row = sampler.position(epoch, local_sample)
        position = self.seed, epoch, step, row, len(images)
        if self.three_augment or self.color_jitter:
            augment_colors(
                images,
                sample_uniforms(*position, COLOR_UNIFORMS, COLORS),
                three_augment=self.three_augment,
                jitter=self.color_jitter,
                mean=self.mean,
                std=self.std,
            )
        if self.erasing:
            uniforms = sample_uniforms(*position, ERASING_UNIFORMS, ERASING)
            erase(images, uniforms, probability=self.erasing, mode=self.erasing_mode)
        if not self._blends(epoch):
            return images, labels
        # Ranks blend within their micro-batches: without the rank all would draw alike.
        draw = [self.seed, epoch, local_sample // len(images), sampler.dp_rank]
        return Blend(self.mixup, self.cutmix)(images, labels, draw)

    def _blends(self, epoch: int) -> bool:
        last_epochs = self.mixup_off_epochs
        # A range test may be longer than the training: without last epochs all are blended.
        if last_epochs and epoch >= self.num_epochs - last_epochs:
            return False
        return bool(self.mixup or self.cutmix)
