import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from cifar10_benchmark.augment import UNIFORMS_PER_SAMPLE, Augment
from common.data.auto_augment import AutoAugment

IMAGES = torch.randint(0, 256, (300, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
UNIFORMS = np.random.default_rng(1).random((len(IMAGES), UNIFORMS_PER_SAMPLE))


def reference(image: torch.Tensor, uniforms: np.ndarray, padding: int, flip: bool) -> torch.Tensor:
    """Pad, crop and mirror one image with torchvision."""
    top, left = (int(uniform * (2 * padding + 1)) for uniform in uniforms[:2])
    image = tv.crop(tv.pad(image, [padding]), top, left, 8, 8)
    return tv.horizontal_flip(image) if flip and uniforms[2] < 0.5 else image


@pytest.mark.parametrize(("padding", "flip"), [(4, True), (2, False), (0, True), (0, False)])
def test_crops_and_flips_are_torchvisions_and_autoaugment_comes_last(padding, flip):
    before = IMAGES.clone()
    augmented = Augment(padding, flip)(IMAGES, UNIFORMS)
    expected = [reference(image, row, padding, flip) for image, row in zip(IMAGES, UNIFORMS, strict=True)]
    assert torch.equal(augmented, torch.stack(expected))
    both = Augment(padding, flip, "cifar10")(IMAGES, UNIFORMS)
    assert torch.equal(both, AutoAugment().augment_batch(augmented, UNIFORMS[:, 3:]))
    assert torch.equal(IMAGES, before)
