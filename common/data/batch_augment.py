"""Augmentation of training batches on their device, after any loader."""

from collections.abc import Generator
from contextlib import closing

from common.data.colors import COLOR_UNIFORMS, augment_colors
from common.data.erasing import ERASING_UNIFORMS, erase
from common.data.loader import Loader
from common.data.mixup import Blend, Blended
from common.data.sampler import COLORS, ERASING, TrainSampler, sample_uniforms
from common.files import Values


class BatchAugment(Loader):
    """Change a training loader's images, then blend them, in place, as the config's keys say.

    The labels of blended images become the arguments of `MixupLoss` beside the logits. The last
    ``MIXUP_OFF_EPOCHS`` epochs are not blended.

    All draws are pure functions of the seed, the loader's position and, for blending, the rank, so
    that a resumed run draws the same.
    """

    def __init__(self, loader: Loader, config: Values):
        super().__init__(loader.sampler, loader.reader)
        self.config = config
        self.blend = Blend(config["MIXUP"], config["CUTMIX"])

    def _batches(self, epoch: int, start: int) -> Generator[Blended, None, None]:
        assert isinstance(self.sampler, TrainSampler)
        config = self.config
        seed = config["SEED"]
        blends = config["MIXUP"] or config["CUTMIX"]
        last_epochs = config["MIXUP_OFF_EPOCHS"]
        # A range test may be longer than the training: without last epochs all are blended.
        if last_epochs and epoch >= config["NUM_EPOCHS"] - last_epochs:
            blends = False
        # ``start`` counts the samples of all ranks.
        local_sample = start // self.sampler.dp_size
        with closing(super()._batches(epoch, start)) as batches:
            for images, labels in batches:
                step, row = self.sampler.position(local_sample)
                position = seed, epoch, step, row, len(images)
                if config["THREE_AUGMENT"] or config["COLOR_JITTER"]:
                    augment_colors(
                        images,
                        sample_uniforms(*position, COLOR_UNIFORMS, COLORS),
                        three_augment=config["THREE_AUGMENT"],
                        jitter=config["COLOR_JITTER"],
                        mean=config["DATA"]["mean"],
                        std=config["DATA"]["std"],
                    )
                if config["ERASING"]:
                    uniforms = sample_uniforms(*position, ERASING_UNIFORMS, ERASING)
                    erase(
                        images,
                        uniforms,
                        probability=config["ERASING"],
                        mode=config["ERASING_MODE"],
                    )
                # Ranks blend within their micro-batches: without the rank all would draw alike.
                micro_batch = local_sample // len(images)
                local_sample += len(images)
                if blends:
                    draw = [seed, epoch, micro_batch, self.sampler.dp_rank]
                    yield self.blend(images, labels, draw)
                else:
                    yield images, labels
