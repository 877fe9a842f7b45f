from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from common.errors import UserError
from common.loader import Loader
from common.sampling import Draw, TrainSampler
from imagenet_dali.mixup import Mixup, MixupLoss, mix


class ConstantReader:
    """Reads images filled with their sample's number, which is their label too."""

    def read(self, draws: Iterator[Draw]) -> Iterator[tuple[Tensor, Tensor]]:
        for draw in draws:
            labels = torch.from_numpy(draw.indices)
            yield labels.float()[:, None, None, None].expand(-1, 3, 2, 2).clone(), labels

    def close(self) -> None:
        pass


def build_loader(dp_rank: int = 0) -> Loader:
    sampler = TrainSampler(48, global_batch=16, micro_batch=4, dp_rank=dp_rank, dp_size=2, seed=1)
    return Loader(sampler, ConstantReader())


def build_mixup(dp_rank: int = 0, alpha: float = 0.2, seed: int = 7) -> Mixup:
    return Mixup(build_loader(dp_rank), alpha, seed)


def shares(mixup: Mixup) -> list[float]:
    return [labels["share"].item() for _, labels in mixup]


def test_blends_with_the_mirrored_sample() -> None:
    images = torch.arange(5.0)[:, None, None, None].expand(5, 3, 2, 2).clone()
    labels = torch.arange(5)
    blended, arguments = mix(images, labels, 0.75)
    assert blended is images
    expected = 0.75 * labels + 0.25 * labels.flip(0)
    assert torch.equal(blended, expected[:, None, None, None].expand(5, 3, 2, 2))
    assert torch.equal(arguments["target"], labels)
    assert arguments["other"].tolist() == [4, 3, 2, 1, 0]
    assert arguments["share"].item() == 0.75
    assert arguments["share"].shape == ()


def test_images_and_labels_have_the_same_share() -> None:
    batches = list(build_mixup())
    assert len(batches) == len(build_mixup()) == 6
    for images, labels in batches:
        values = labels["share"] * labels["target"] + (1 - labels["share"]) * labels["other"]
        assert torch.allclose(images, values[:, None, None, None].expand_as(images), atol=1e-5)


def test_shares_differ_by_epoch_step_rank_and_seed_only() -> None:
    mixup = build_mixup()
    first, second = shares(mixup), shares(mixup)
    drawn = [*first, *second, *shares(build_mixup(dp_rank=1)), *shares(build_mixup(seed=8))]
    assert len(set(drawn)) == len(drawn)
    assert shares(build_mixup()) == first


def test_shares_are_beta_distributed() -> None:
    """Mean 1/2 and variance 1 / (4 (2 alpha + 1)), within five standard errors of 600 draws."""
    mixup = build_mixup(alpha=0.2)
    drawn = torch.tensor([share for _ in range(100) for share in shares(mixup)])
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.09)
    assert drawn.var().item() == pytest.approx(1 / (4 * 1.4), abs=0.03)


def test_resumed_pass_draws_the_same() -> None:
    whole = shares(build_mixup())
    mixup = build_mixup()
    batches = iter(mixup)
    for _ in range(2):
        next(batches)
    resumed = build_mixup()
    resumed.load_state_dict(mixup.state_dict())
    assert shares(resumed) == whole[2:]
    mixup.close()


def test_alpha_0_changes_nothing() -> None:
    for (images, labels), (plain_images, plain_labels) in zip(build_mixup(alpha=0.0), build_loader(), strict=True):
        assert torch.equal(images, plain_images)
        assert torch.equal(labels, plain_labels)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_equals_cross_entropy_of_blended_targets(label_smoothing: float) -> None:
    torch.manual_seed(0)
    logits, target, other = torch.randn(8, 5), torch.randint(5, (8,)), torch.randint(5, (8,))
    soft = 0.3 * F.one_hot(target, 5) + 0.7 * F.one_hot(other, 5)
    expected = F.cross_entropy(logits, soft, label_smoothing=label_smoothing)
    criterion = MixupLoss(label_smoothing)
    assert criterion(logits, target=target, other=other, share=torch.tensor(0.3)).item() == pytest.approx(
        expected.item(), rel=1e-6
    )
    plain = F.cross_entropy(logits, target, label_smoothing=label_smoothing)
    assert torch.equal(criterion(logits, target), plain)


def test_loss_is_fp32_and_leaves_out_padding() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 5, dtype=torch.bfloat16)
    loss = MixupLoss()(logits, torch.tensor([1, -100, 3, -100]))
    assert loss.dtype == torch.float32
    assert torch.equal(loss, F.cross_entropy(logits[::2].float(), torch.tensor([1, 3])))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_batch_of_nothing_but_padding_has_neither_loss_nor_gradient(label_smoothing: float) -> None:
    logits, padding = torch.randn(4, 5, requires_grad=True), torch.full((4,), -100)
    loss = MixupLoss(label_smoothing)(logits, padding, other=padding, share=torch.tensor(0.3))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(4, 5))


def test_bad_values() -> None:
    with pytest.raises(UserError, match="MIXUP=-0.1 must be at least 0"):
        build_mixup(alpha=-0.1)
    with pytest.raises(UserError, match="LABEL_SMOOTHING=1.0 must be"):
        MixupLoss(1.0)
