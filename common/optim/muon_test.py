"""Muon against torch.optim.Muon and AdamW side by side."""

import pytest
import torch
from torch import nn

from common.optim import muon
from common.optim.muon import Muon, orthogonalize

OPTIONS = {"lr": 3e-3, "weight_decay": 0.1}


def test_equals_torchs_muon_and_adamw_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        muon, "orthogonalize", lambda whole, stacked: orthogonalize(whole.bfloat16(), stacked).to(whole)
    )
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(*shape)) for shape in ((96, 32), (64, 32), (32, 64), (32,))]
    fused = [nn.Parameter(part.clone()) for part in ours[0].detach().chunk(3)]
    theirs = [*fused, *(nn.Parameter(p.detach().clone()) for p in ours[1:])]
    optimizer = Muon(ours, dict(zip(ours[:3], (3, 1, 1), strict=True)), **OPTIONS)
    pair = (
        torch.optim.Muon(theirs[:-1], momentum=0.95, adjust_lr_fn="match_rms_adamw", **OPTIONS),
        torch.optim.AdamW(theirs[-1:], **OPTIONS),
    )
    for _ in range(5):
        for p, gradient in zip(ours, gradients := [torch.randn_like(p) for p in ours], strict=True):
            p.grad = gradient
        for p, gradient in zip(theirs, [*gradients[0].chunk(3), *gradients[1:]], strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        for other in pair:
            other.step()
    torch.testing.assert_close(ours[0].detach().chunk(3), [p.detach() for p in fused], rtol=0, atol=2e-5)
    torch.testing.assert_close(ours[1:], theirs[3:], rtol=0, atol=2e-5)
    assert set(optimizer.state[ours[1]]) == {"momentum_buffer"}
    assert set(optimizer.state[ours[3]]) == {"step", "exp_avg", "exp_avg_sq"}
