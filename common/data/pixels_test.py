import gc

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as F

from common.data.crops import UNIFORMS_PER_SAMPLE, RandomCrop
from common.data.micro_batches import sample_uniforms
from common.data.pixels import Normalizer, crop_image


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_random_crop_has_the_pixels_of_pillow(interpolation):
    random = np.random.default_rng(0)
    crop = RandomCrop(interpolation=interpolation)
    for number, (height, width) in enumerate([(375, 500), (30, 41), (9, 13), *random.integers(20, 400, (20, 2))]):
        image = random.integers(0, 256, (height, width, 3), np.uint8)
        uniforms = sample_uniforms(seed=0, epoch=0, step=number, row=0, rows=1, count=UNIFORMS_PER_SAMPLE)
        crops = crop(np.array([height]), np.array([width]), uniforms)
        place = *crops.start[0].tolist(), *crops.shape[0].tolist(), [224, 224]
        expected = F.resized_crop(Image.fromarray(image), *place, F.InterpolationMode(interpolation))
        expected = np.asarray(F.hflip(expected) if crops.flip[0] else expected, int)
        difference = np.abs(crop_image(image, crop, 224, uniforms) - expected)
        assert difference.max() <= 1 or interpolation == "bicubic"  # of noise, clipped between the passes
        assert difference.mean() < 0.5


def test_normalisation_is_that_of_torchvision_and_reuses_memory_that_nobody_holds():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    normalize = Normalizer(mean, std, torch.device("cpu"))
    images = torch.randint(0, 256, (2, 5, 7, 3), dtype=torch.uint8)
    first = normalize(images)
    torch.testing.assert_close(first, F.normalize(images.permute(0, 3, 1, 2) / 255, mean, std))
    address, held = first.data_ptr(), first[1:]
    del first
    gc.collect()
    assert normalize(images).data_ptr() != address  # a view of it is held
    del held
    gc.collect()
    assert address in {batch.data_ptr() for batch in [normalize(images), normalize(images)]}
    assert normalize(images[:1]).shape == (1, 3, 5, 7)
