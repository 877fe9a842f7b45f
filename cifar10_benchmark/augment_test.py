import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from cifar10_benchmark.augment import UNIFORMS_PER_SAMPLE, Augment
from cifar10_benchmark.autoaugment import auto_augment

IMAGES = torch.randint(0, 256, (300, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
UNIFORMS = np.random.default_rng(1).random((len(IMAGES), UNIFORMS_PER_SAMPLE))


def reference(image: torch.Tensor, uniforms: np.ndarray, padding: int, flip: bool) -> torch.Tensor:
    """Pad, crop and mirror one image with torchvision."""
    top, left = (int(uniform * (2 * padding + 1)) for uniform in uniforms[:2])
    image = tv.crop(tv.pad(image, [padding]), top, left, 8, 8)
    return tv.horizontal_flip(image) if flip and uniforms[2] < 0.5 else image


@pytest.mark.parametrize(("padding", "flip"), [(4, True), (2, False), (0, True), (0, False)])
def test_crops_and_flips_are_torchvisions(padding, flip):
    before = IMAGES.clone()
    augmented = Augment(padding, flip)(IMAGES, UNIFORMS)
    expected = [reference(image, row, padding, flip) for image, row in zip(IMAGES, UNIFORMS, strict=True)]
    assert torch.equal(augmented, torch.stack(expected))
    assert torch.equal(IMAGES, before)


def test_autoaugment_comes_last():
    plain, augmented = Augment(4, True)(IMAGES, UNIFORMS), Augment(4, True, "cifar10")(IMAGES, UNIFORMS)
    assert torch.equal(augmented, auto_augment(plain, UNIFORMS[:, 3:]))
    assert not torch.equal(augmented, plain)
