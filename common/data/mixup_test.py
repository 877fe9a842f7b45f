import numpy as np
import pytest
import torch
from timm.data.mixup import cutmix_bbox_and_lam, mixup_target
from timm.loss import BinaryCrossEntropy
from torch.nn import functional as F

from common.data.mixup import MixupLoss, cut_and_paste


@pytest.mark.parametrize("center", [(0.5, 0.5), (0.0, 0.99), (0.31, 0.07)])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.71, 1.0])
def test_cuts_and_pastes_the_rectangle_that_timm_does(share: float, center: tuple[float, float], monkeypatch) -> None:
    images, labels = torch.rand(5, 3, 9, 12), torch.arange(5)
    places = iter(center)
    monkeypatch.setattr(np.random, "randint", lambda low, high, size: int(next(places) * high))
    (top, bottom, left, right), area_share = cutmix_bbox_and_lam(images.shape, share)
    expected = images.clone()
    expected[:, :, top:bottom, left:right] = images.flip(0)[:, :, top:bottom, left:right]
    pasted, arguments = cut_and_paste(images, labels, share, center)
    assert pasted is images
    assert torch.equal(pasted, expected)
    assert arguments["share"].item() == pytest.approx(area_share)
    assert torch.equal(arguments["target"], labels)
    assert arguments["other"].tolist() == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_equals_cross_entropy_of_blended_targets(label_smoothing: float) -> None:
    torch.manual_seed(0)
    logits, target, other = torch.randn(8, 5), torch.randint(5, (8,)), torch.randint(5, (8,))
    soft = 0.3 * F.one_hot(target, 5) + 0.7 * F.one_hot(other, 5)
    expected = F.cross_entropy(logits, soft, label_smoothing=label_smoothing)
    criterion = MixupLoss(label_smoothing)
    blended = criterion(logits, target=target, other=other, share=torch.tensor(0.3))
    torch.testing.assert_close(blended, expected, rtol=1e-6, atol=0)
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


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5])
def test_binary_cross_entropy_is_timms(threshold: float) -> None:
    torch.manual_seed(0)
    logits, target, other = torch.randn(9, 5), torch.randint(5, (9,)), torch.randint(5, (9,))
    theirs, criterion = BinaryCrossEntropy(smoothing=0, target_threshold=threshold), MixupLoss(0.0, threshold)
    for share in (0.0, 0.1, 0.3, 0.85, 1.0):
        blend = mixup_target(target, 5, share)  # with the mirrored batch, as `mix`
        mixed = criterion(logits, target=target, other=target.flip(0), share=torch.tensor(share))
        torch.testing.assert_close(mixed, theirs(logits, blend), rtol=1e-6, atol=0)
    torch.testing.assert_close(criterion(logits, target), theirs(logits, target), rtol=1e-6, atol=0)
    padded = torch.cat([target, torch.full((3,), -100)]), torch.cat([other, torch.full((3,), -100)])
    found = criterion(torch.cat([logits, logits[:3]]).bfloat16(), *padded, torch.tensor(0.3))
    torch.testing.assert_close(found, criterion(logits.bfloat16(), target, other, torch.tensor(0.3)))
    assert found.dtype == torch.float32
