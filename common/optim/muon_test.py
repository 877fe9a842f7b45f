"""Muon against torch.optim.Muon and AdamW side by side."""

import torch
from torch import nn

from common.optim import muon
from common.optim.muon import Muon, count_matrices, orthogonalize

OPTIONS = {"lr": 3e-3, "weight_decay": 0.1}


def split(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies, the first tensor in three parts."""
    return [part.detach().clone() for part in (*tensors[0].chunk(3), *tensors[1:])]


def test_equals_torchs_muon_and_adamw_side_by_side(monkeypatch):
    monkeypatch.setattr(
        muon,
        "orthogonalize",
        lambda whole, stacked: orthogonalize(whole.bfloat16(), stacked).to(whole),
    )
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(*shape)) for shape in ((96, 32), (64, 32), (32, 64), (32,))]
    theirs = [nn.Parameter(part) for part in split(ours)]
    optimizer = Muon(
        ours, dict(zip(ours[:3], (3, 1, 1), strict=True)), **OPTIONS, adamw_lr_scale=0.25
    )
    pair = (
        torch.optim.Muon(theirs[:-1], momentum=0.95, adjust_lr_fn="match_rms_adamw", **OPTIONS),
        torch.optim.AdamW(theirs[-1:], **OPTIONS | {"lr": OPTIONS["lr"] / 4}),
    )
    for step in range(5):  # the first gradients are 0
        for p in ours:
            p.grad = step * torch.randn_like(p)
        for p, gradient in zip(theirs, split([p.grad for p in ours]), strict=True):
            p.grad = gradient
        optimizer.step()
        for other in pair:
            other.step()
    torch.testing.assert_close(split(ours), [p.detach() for p in theirs], rtol=0, atol=2e-5)


def test_which_parameters_are_how_many_matrices():
    names = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "norm1")
    assert [count_matrices(f"blocks.0.{name}.weight", (96, 32)) for name in names] == [
        3,
        1,
        1,
        1,
        0,
    ]
    assert (
        count_matrices("stages.0.blocks.1.attn.qkv.weight", (128, 64)) == 2
    )  # of timm's gcvit_tiny
