"""The policy against torchvision's: the same magnitudes, the same pictures."""

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import AutoAugment, AutoAugmentPolicy, InterpolationMode

from cifar10_benchmark.autoaugment import (
    LEVELS,
    NAMES,
    NONE,
    OPERATIONS,
    apply_operations,
    auto_augment,
    magnitude,
)

TORCHVISION = AutoAugment(AutoAugmentPolicy.CIFAR10)
IMAGES = torch.randint(0, 256, (200, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
UNIFORMS = np.random.default_rng(2).random((len(IMAGES), 5))


@pytest.mark.parametrize("name", NAMES)
def test_the_magnitudes_are_torchvisions(name):
    magnitudes, signed = TORCHVISION._AUGMENTATION_SPACE[name]
    theirs = magnitudes(LEVELS, 32, 32)
    assert OPERATIONS[name][3] == signed
    if theirs is not None:
        size = 32 if name.startswith("Translate") else 1  # a share of the side here, pixels there
        ours = [magnitude(name, level) * size for level in range(LEVELS)]
        assert ours == pytest.approx(theirs.tolist(), rel=1e-6)


def reference(image: torch.Tensor, uniforms: np.ndarray) -> torch.Tensor:
    """Augment one image by torchvision's functions, following the same numbers."""
    for stage, (name, probability, level) in enumerate(TORCHVISION._policies[int(uniforms[0] * 25)]):
        if uniforms[1 + 2 * stage] >= probability:
            continue
        magnitudes, signed = TORCHVISION._AUGMENTATION_SPACE[name]
        values = magnitudes(10, 32, 32)
        value = 0.0 if values is None else float(values[level])
        value = -value if signed and uniforms[2 + 2 * stage] < 0.5 else value
        image = TORCHVISION._apply_image_or_video_transform(
            image, name, value, InterpolationMode.NEAREST, TORCHVISION._fill
        )
    return image


def test_pictures_are_those_of_torchvision_image_by_image():
    before = IMAGES.clone()
    augmented = auto_augment(IMAGES, UNIFORMS)
    assert torch.equal(IMAGES, before)
    expected = torch.stack([reference(image, row) for image, row in zip(IMAGES, UNIFORMS, strict=True)])
    # a last bit may grow in the second operation: equalising puts two neighbouring values a histogram bin apart
    far_apart = ((augmented.int() - expected.int()).abs() > 1).float().mean((1, 2, 3))
    assert far_apart.max() < 0.05
    assert (augmented != IMAGES).flatten(1).any(1).float().mean() > 0.5


def test_an_image_does_not_depend_on_its_batch_and_stays_without_an_operation():
    whole = auto_augment(IMAGES, UNIFORMS)
    parts = [auto_augment(IMAGES[rows], UNIFORMS[rows]) for rows in (slice(0, 3), slice(3, 150), slice(150, None))]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(apply_operations(IMAGES, np.full(len(IMAGES), NONE), np.zeros(len(IMAGES))), IMAGES)
