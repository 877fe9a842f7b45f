"""Muon against torch.optim.Muon and AdamW side by side."""

import pytest
import torch
from torch import Tensor, nn

from common.optim import muon
from common.optim.muon import Muon, orthogonalize

OPTIONS = {"lr": 3e-3, "weight_decay": 0.1}
SHAPES = [(3, 32, 32), (1, 64, 32), (1, 32, 64), (1, 32, 32), (1, 64, 32)]


def split(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies, the first tensor in three parts."""
    return [part.detach().clone() for part in (*tensors[0].chunk(3), *tensors[1:])]


@pytest.mark.parametrize("batch", [None, 3 * 2048, 1 << 22])
def test_equals_torchs_muon_and_adamw_side_by_side(batch, monkeypatch):
    """In float64, one by one, as on CPUs, and batched, as on GPUs; an update is skipped."""
    monkeypatch.setattr(torch, "bfloat16", torch.float64)  # what both iterate in
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.double)
    if batch:
        monkeypatch.setattr(Tensor, "is_cpu", False)
        monkeypatch.setattr(muon, "BATCH", batch)
    torch.manual_seed(0)
    shapes = [*((k * m, n) for k, m, n in SHAPES), (32,)]
    ours = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    theirs = [nn.Parameter(part) for part in split(ours)]
    optimizer = Muon(
        [{"params": ours[:2], "lr": 1e-2}, {"params": ours[2:]}],
        dict(zip(ours[:-1], SHAPES, strict=True)),
        momentum=0.95,
        adamw_lr_scale=0.25,
        **OPTIONS,
    )
    groups = [{"params": theirs[:4], "lr": 1e-2}, {"params": theirs[4:-1]}]
    pair = (
        torch.optim.Muon(groups, momentum=0.95, adjust_lr_fn="match_rms_adamw", **OPTIONS),
        torch.optim.AdamW(theirs[-1:], **OPTIONS | {"lr": OPTIONS["lr"] / 4}),
    )
    for step in range(5):  # the first gradients are 0
        for p in ours:
            p.grad = step * torch.randn_like(p)
        for p, gradient in zip(theirs, split([p.grad for p in ours]), strict=True):
            p.grad = gradient
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        for other in pair:
            other.step()
        ours[step].grad.fill_(torch.nan)
        optimizer.found_inf = torch.ones(())
        optimizer.step()
    torch.testing.assert_close(split(ours), [p.detach() for p in theirs], rtol=1e-12, atol=1e-12)


def test_iterates_in_bfloat16_if_asked_on_a_cpu_with_instructions_for_it(monkeypatch):
    torch.manual_seed(0)
    matrix = torch.randn(32, 64)
    exact, rounded = (orthogonalize([matrix], 32, bfloat16)[0] for bfloat16 in (False, True))
    assert 0.001 < (rounded - exact).norm() / exact.norm() < 0.02
    monkeypatch.setattr("common.optim.muon.is_fast", lambda _: False)
    assert not Muon([matrix], {}, 0.9, bfloat16=True).bfloat16
