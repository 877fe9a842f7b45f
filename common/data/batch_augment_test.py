"""Augmentation of batches, its draws and the loss, against torchvision, Pillow and timm."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from scipy.ndimage import gaussian_filter
from timm.data.mixup import cutmix_bbox_and_lam, mixup_target
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import functional as tv
from torchvision.transforms import v2

from common.data.auto_augment_test import IMAGE
from common.data.batch_augment import BatchAugment
from common.data.colors import augment_colors
from common.data.erasing import ERASED, ERASING_UNIFORMS, erase
from common.data.loader import Loader
from common.data.mixup import Blend, MixupLoss, cut_and_paste
from common.data.sampler import Draw, TrainSampler, sample_uniforms

SIDE = 6
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
NORMALIZED = {
    "mean": (0.5, 0.5, 0.5),
    "std": (2.0, 2.0, 2.0),
}
CHANGES = {
    "three_augment": True,
    "color_jitter": 0.3,
    "erasing": 0.5,
}
PIXEL = CHANGES | {"erasing_mode": "pixel", "mixup": 0.2}


class ConstantReader:
    """Reads images filled with their sample's number, which is their label too."""

    def read(self, draws: Iterator[Draw]) -> Iterator[tuple[Tensor, Tensor]]:
        for draw in draws:
            labels = torch.from_numpy(draw.indices)
            values = labels.float() + 1
            pixels = values.view(-1, 1, 1, 1)
            images = pixels.repeat(1, 3, SIDE, SIDE)
            yield images, labels


def build(dp_rank: int = 0, **options: Any) -> Loader:
    sampler = TrainSampler(
        48,
        total_batch=16,
        micro_batch=4,
        dp_rank=dp_rank,
        dp_size=2,
        seed=1,
    )
    loader = Loader(sampler, ConstantReader())
    loader.augment = BatchAugment(7, **NORMALIZED, **options)
    return loader


@pytest.mark.parametrize("alphas", [{"mixup": 0.2}, {"cutmix": 1.0}])
def test_images_and_labels_have_the_same_share(alphas):
    augment = build(**alphas)
    for images, labels in augment:
        share = labels["lam"]
        of_target = share * labels["target"]
        of_other = (1 - share) * labels["other"]
        means = images.mean((1, 2, 3))
        assert torch.allclose(means, 1 + of_target + of_other, atol=1e-5)
    if "mixup" in alphas:
        drawn = []
        for _ in range(100):
            drawn += [labels["lam"] for _, labels in augment]
        shares = torch.tensor(drawn)
        # Beta: mean 1/2, variance 1 / (4 (2 alpha + 1)); within five standard errors
        variance = 1 / (4 * 1.4)
        assert shares.mean().item() == pytest.approx(0.5, abs=0.09)
        assert shares.var().item() == pytest.approx(variance, abs=0.03)


def test_mixup_and_cutmix_alternate():
    """Each for half of the micro-batches, within five standard errors of 600."""
    both = build(mixup=0.8, cutmix=1.0)
    is_cut = []
    for _ in range(100):
        for images, _ in both:
            whole = images.round()  # a cut leaves whole numbers
            is_cut.append(torch.equal(images, whole))
    assert np.mean(is_cut) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("epochs", "off", "expected"),
    [
        (3, 2, [True, False]),
        # a range test may be longer than the training: without last epochs all are blended
        (1, 0, [True, True]),
    ],
)
def test_the_last_epochs_are_not_blended(epochs, off, expected):
    augment = build(mixup=0.2, num_epochs=epochs, mixup_off_epochs=off)
    for epoch in range(2):
        is_blended = [isinstance(labels, dict) for _, labels in augment]
        assert len(is_blended) == 6
        assert set(is_blended) == {expected[epoch]}


def images_of_two_epochs(loader: Loader) -> list[Tensor]:
    result = []
    for _ in range(2):
        result += [images for images, _ in loader]
    return result


def test_all_draws_depend_on_seed_and_position_alone():
    """In each process and each epoch."""
    for rank in (1, 0):
        plain = build(rank)
        augment = build(rank, **PIXEL)
        found = images_of_two_epochs(augment)
        for number, (images, labels) in enumerate([*plain, *plain]):
            epoch, batch = divmod(number, 6)
            step, micro_batch = divmod(batch, 2)
            first_row = 8 * rank + 4 * micro_batch
            position = (7, epoch, step, first_row, 4)  # the seed is first, the number of rows last
            colors = sample_uniforms(*position, 5, 3)
            augment_colors(images, colors, three_augment=True, jitter=0.3, **NORMALIZED)
            erasing = sample_uniforms(*position, ERASING_UNIFORMS, 2)
            erase(images, erasing, probability=0.5, mode="pixel")
            blend = Blend(0.2, 0.0)
            blended, _ = blend(images, labels, [7, epoch, batch, rank])
            assert torch.equal(found[number], blended)


def test_a_resumed_loader_draws_what_the_first_did():
    augment = build(**PIXEL)
    resumed = build(**PIXEL)
    found = images_of_two_epochs(augment)
    resumed.load_state_dict({"epoch": 0, "samples": 32})
    for number, (images, _) in enumerate(resumed, start=4):
        assert torch.equal(images, found[number])
    assert number == 5
    assert resumed.state_dict() == {"epoch": 1, "samples": 0}


def test_an_epoch_of_a_data_set_that_has_shrunk_since_has_ended():
    resumed = build(**PIXEL)
    resumed.load_state_dict({"epoch": 1, "samples": 48})
    assert resumed.state_dict() == {"epoch": 2, "samples": 0}


@pytest.mark.parametrize("key", CHANGES)
def test_each_change_is_there_without_the_others(key):
    plain = build()
    augment = build(**{key: CHANGES[key]})
    unchanged, _ = next(iter(plain))
    changed, _ = next(iter(augment))
    assert not torch.equal(changed, unchanged)


def test_what_is_erased_is_a_random_crop_with_torchvisions_limits():
    uniforms = np.random.default_rng(0).random((2000, ERASING_UNIFORMS))
    images, expected = torch.ones(2, 2000, 3, 40, 30)
    erase(images, uniforms, probability=0.7, mode="const")
    sizes = np.full((2000, 2), (40, 30))
    crops = ERASED(sizes, uniforms)
    is_erased = uniforms[:, -1] < 0.7
    for row in np.flatnonzero(is_erased):
        top, left = crops.start[row]
        height, width = crops.shape[row]
        bottom = top + height
        right = left + width
        expected[row, :, top:bottom, left:right] = 0
    assert torch.equal(images, expected)
    theirs = v2.RandomErasing()
    assert ERASED.scale == pytest.approx(theirs.scale, abs=0.004)
    assert ERASED.ratio == pytest.approx(theirs.ratio, abs=0.004)


def test_erased_pixels_are_noise_of_the_samples_own_seed():
    uniforms = np.random.default_rng(0).random((2000, ERASING_UNIFORMS))
    images, noisy, other = torch.ones(3, 2000, 3, 40, 30)
    erase(images, uniforms, probability=0.7, mode="const")
    erase(noisy, uniforms, probability=0.7, mode="pixel")
    assert torch.equal(noisy == 1, images == 1)
    noise = noisy[images == 0]
    assert noise.mean().item() == pytest.approx(0, abs=0.01)
    assert noise.std().item() == pytest.approx(1, abs=0.01)
    uniforms[0, -2] /= 2  # seeds the noise, and moves nothing
    erase(other, uniforms, probability=0.7, mode="pixel")
    assert not torch.equal(other, noisy)


def colored(uniforms: list[float], jitter: float = 0.0, image: Image.Image = IMAGE) -> np.ndarray:
    """Return the pixels, [rows, columns, 3], of an image that is augmented beside a flat one."""
    normalized = tv.normalize(tv.to_tensor(image), MEAN, STD)
    images = torch.stack([normalized, torch.zeros_like(normalized)])
    rows = np.array([uniforms, uniforms])
    augment_colors(
        images,
        rows,
        three_augment=not jitter,
        jitter=jitter,
        mean=MEAN,
        std=STD,
    )
    pixels = images[0].permute(1, 2, 0)
    shares = pixels * torch.tensor(STD) + torch.tensor(MEAN)
    return (255 * shares).numpy()


def difference(found: np.ndarray, expected: Image.Image | np.ndarray) -> float:
    """Return the largest difference of two images in levels."""
    return np.abs(found - np.asarray(expected, float)).max()


def blurred(sigma: float) -> np.ndarray:
    pixels = np.asarray(IMAGE, float)
    return gaussian_filter(pixels, (sigma, sigma, 0), mode="nearest")


GRAY = ImageOps.grayscale(IMAGE).convert("RGB")
SOLARIZED = ImageOps.solarize(IMAGE)


@pytest.mark.parametrize(
    ("uniforms", "expected", "most"),
    [
        ([0.1, 0.0], GRAY, 1.01),
        ([0.5, 0.0], SOLARIZED, 0.01),
        ([0.9, 0.5], blurred(1.05), 0.51),
        ([0.9, 1.0], blurred(2), 0.51),
    ],
)
def test_each_operation_of_3_augment_is_deits(uniforms, expected, most):
    found = colored([*uniforms, 0.5, 0.5, 0.5])
    assert difference(found, expected) <= most


def test_jitter_is_torchvisions():
    """Within a level for each of the three roundings, if nothing is clipped; clipping is last."""
    soft = IMAGE.point(lambda value: 70 + 0.4 * value)
    found = colored([0, 0, 1 / 3, 1 / 6, 5 / 6], jitter=0.3, image=soft)
    expected = tv.adjust_brightness(soft, 0.9)
    expected = tv.adjust_contrast(expected, 0.8)
    expected = tv.adjust_saturation(expected, 1.2)
    assert difference(found, expected) <= 3
    clipped = colored([0, 0, 0.5, 1, 0.5], jitter=0.3)
    assert difference(clipped, tv.adjust_contrast(IMAGE, 1.3)) <= 1.01


@pytest.mark.parametrize(
    "center",
    [
        (0.5, 0.5),
        (0.0, 0.99),
        (0.31, 0.07),
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.71, 1.0])
def test_cuts_and_pastes_the_rectangle_that_timm_does(share, center, monkeypatch):
    images = torch.rand(5, 3, 9, 12)
    coordinates = iter(center)

    def randint(low: int, high: int, size: None) -> int:
        return int(next(coordinates) * high)

    monkeypatch.setattr(np.random, "randint", randint)
    box, _ = cutmix_bbox_and_lam(images.shape, share)
    top, bottom, left, right = box
    others = images.flip(0)
    expected = images.clone()
    expected[..., top:bottom, left:right] = others[..., top:bottom, left:right]
    labels = torch.arange(5)
    pasted, _ = cut_and_paste(images, labels, share, center)
    assert torch.equal(pasted, expected)


@pytest.mark.parametrize("weights", [None, torch.arange(5) / 3])
@pytest.mark.parametrize(
    ("smoothing", "threshold", "is_summed"),
    [
        (0.0, None, False),
        (0.1, None, False),
        (0.0, 0, False),
        (0.1, 0.2, True),
        (0.0, 0.5, False),
        (0.1, "soft", True),
    ],
)
def test_the_loss_is_torchs_or_timms(smoothing, threshold, is_summed, weights):
    """Computed in float32, of all rows but the padding."""
    torch.manual_seed(0)
    logits = torch.randn(9, 5, dtype=torch.bfloat16)
    target = torch.randint(5, (9,))
    criterion = MixupLoss(smoothing, threshold, is_summed, weights)
    of_classes = torch.ones(5) if weights is None else weights
    padded = F.pad(logits, (0, 0, 0, 3))
    labels = F.pad(target, (0, 3), value=-100)
    reversed_target = target.flip(0)
    others = F.pad(reversed_target, (0, 3), value=-100)
    exact = logits.float()
    for share in (0.0, 0.1, 0.3, 0.85, 1.0):
        soft = mixup_target(target, 5, share, smoothing)
        if threshold is None:
            expected = F.cross_entropy(exact, soft, weights)
        else:
            wanted = soft if threshold == "soft" else (soft > threshold).float()
            losses = F.binary_cross_entropy_with_logits(exact, wanted, reduction="none")
            of_images = losses.sum(1) if is_summed else losses.mean(1)
            hard = mixup_target(target, 5, share)
            image_weights = hard @ of_classes
            expected = (image_weights * of_images).mean()
        blended = criterion(padded, labels, others, torch.tensor(share))
        torch.testing.assert_close(blended, expected, rtol=1e-6, atol=0)
    of_one = criterion(padded, labels)
    torch.testing.assert_close(of_one, expected, rtol=1e-6, atol=0)
    only_padding = torch.full_like(target, -100)
    assert criterion(logits, only_padding) == 0
