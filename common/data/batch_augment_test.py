from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from common.data.batch_augment import UNIFORMS_PER_SAMPLE, BatchAugment, erase
from common.data.color_augment import ColorAugment
from common.data.loader import Loader
from common.data.micro_batches import Draw, TrainSampler

SIDE = 6


class ConstantReader:
    """Reads images filled with their sample's number, which is their label too."""

    def read(self, draws: Iterator[Draw]) -> Iterator[tuple[Tensor, Tensor]]:
        for draw in draws:
            labels = torch.from_numpy(draw.indices)
            yield labels.float()[:, None, None, None].expand(-1, 3, SIDE, SIDE) + 1, labels

    def close(self) -> None:
        pass


def build_loader(dp_rank: int = 0, dp_size: int = 2, micro_batch: int = 4) -> Loader:
    sampler = TrainSampler(48, global_batch=16, micro_batch=micro_batch, dp_rank=dp_rank, dp_size=dp_size, seed=1)
    return Loader(sampler, ConstantReader())


def build_augment(
    dp_rank: int = 0, mixup: float = 0.2, cutmix: float = 0.0, erasing: float = 0.0, seed: int = 7, **ranks: int
) -> BatchAugment:
    colors = ColorAugment(True, 0.3, (0.5,) * 3, (2.0,) * 3) if erasing else None
    blends = dict(mixup=mixup, cutmix=cutmix, erasing=erasing)
    return BatchAugment(build_loader(dp_rank, **ranks), **blends, colors=colors, seed=seed)


def shares(augment: BatchAugment) -> list[float]:
    return [labels["share"].item() for _, labels in augment]


def advance(augment: BatchAugment, batches: int) -> BatchAugment:
    """Return another one that resumes after ``batches`` of this one."""
    for _ in islice(augment, batches):
        pass
    resumed = build_augment(mixup=augment.mixup, erasing=augment.erasing)
    resumed.load_state_dict(augment.state_dict())
    return resumed


def test_images_and_labels_have_the_same_share() -> None:
    batches = list(build_augment())
    assert len(batches) == len(build_augment()) == 6
    for images, labels in batches:
        values = labels["share"] * labels["target"] + (1 - labels["share"]) * labels["other"]
        assert torch.allclose(images, 1 + values[:, None, None, None].expand_as(images), atol=1e-5)


def test_shares_differ_by_epoch_step_rank_and_seed_only() -> None:
    augment = build_augment()
    first, second = shares(augment), shares(augment)
    drawn = [*first, *second, *shares(build_augment(dp_rank=1)), *shares(build_augment(seed=8))]
    assert len(set(drawn)) == len(drawn)
    assert shares(build_augment()) == first


def test_shares_are_beta_distributed() -> None:
    """Mean 1/2 and variance 1 / (4 (2 alpha + 1)), within five standard errors of 600 draws."""
    augment = build_augment(mixup=0.2)
    drawn = torch.tensor([share for _ in range(100) for share in shares(augment)])
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.09)
    assert drawn.var().item() == pytest.approx(1 / (4 * 1.4), abs=0.03)


def test_resumed_pass_draws_the_same() -> None:
    assert shares(advance(build_augment(), 2)) == shares(build_augment())[2:]


def test_mixup_and_cutmix_alternate() -> None:
    """Both for half of the micro-batches, within five standard errors; either one alone always."""

    def cut(augment: BatchAugment) -> list[bool]:
        """Return of each micro-batch whether every pixel is of one image or the other."""
        found = []
        for images, labels in augment:
            sources = torch.stack([labels["target"], labels["other"]]).float()[:, :, None, None, None] + 1
            found.append(bool((images == sources).any(0).all()))
        return found

    both = build_augment(mixup=0.8, cutmix=1.0)
    drawn = [is_cut for _ in range(100) for is_cut in cut(both)]
    assert np.mean(drawn) == pytest.approx(0.5, abs=5 * 0.5 / len(drawn) ** 0.5)
    assert all(cut(build_augment(mixup=0.0, cutmix=1.0)))
    assert not any(cut(build_augment(mixup=1.0)))


def test_what_is_erased_is_what_torchvision_erases() -> None:
    """As often, of the same areas and shapes: quantiles of 3,000 samples; each erased part is a whole rectangle."""
    samples, side = 3000, 40
    images = torch.ones(samples, 3, side, side)
    erase(images, np.random.default_rng(0).random((samples, UNIFORMS_PER_SAMPLE)), 0.7)
    transform = v2.RandomErasing(p=0.7, scale=(0.02, 1 / 3), ratio=(0.3, 3.3))
    torch.manual_seed(0)
    theirs = torch.stack([transform(torch.ones(3, side, side)) for _ in range(samples)])

    def rectangles(erased: Tensor) -> Tensor:
        gone = erased[:, 0] == 0
        assert torch.equal(erased, (~gone)[:, None].float().expand_as(erased))  # all channels, and nothing else
        height, width = gone.any(2).sum(1), gone.any(1).sum(1)
        assert torch.equal(gone.sum((1, 2)), height * width)
        some = height > 0
        top, left = gone.any(2).float().argmax(1), gone.any(1).float().argmax(1)
        return torch.stack([height * width / side**2, (width / height).log(), top / side, left / side])[:, some]

    ours, theirs = rectangles(images), rectangles(theirs)
    assert ours.shape[1] == pytest.approx(0.7 * samples, abs=5 * (0.21 * samples) ** 0.5)
    levels = torch.linspace(0.05, 0.95, 19)
    distance = (ours.quantile(levels, 1) - theirs.quantile(levels, 1)).abs().amax(0)
    assert (distance < torch.tensor([0.02, 0.1, 0.06, 0.06])).all(), distance


def test_colors_and_erasing_are_the_same_in_any_number_of_processes_and_after_a_restart() -> None:
    one = [images for images, _ in build_augment(mixup=0, erasing=0.5, dp_size=1, micro_batch=16)]
    two = [list(build_augment(rank, mixup=0, erasing=0.5)) for rank in range(2)]
    for step, images in enumerate(one):
        parts = [two[rank][2 * step + micro][0] for rank in range(2) for micro in range(2)]
        assert torch.equal(torch.cat(parts), images)
    resumed = advance(build_augment(mixup=0, erasing=0.5), 4)
    for (images, _), (expected, _) in zip(resumed, two[0][4:], strict=True):
        assert torch.equal(images, expected)
