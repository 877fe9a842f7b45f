"""Muon against torch.optim.Muon and AdamW side by side."""

import pytest
import torch
from torch import Tensor, nn

from common.optim import muon
from common.optim.muon import Muon, orthogonalize

OPTIONS = {"lr": 3e-3, "weight_decay": 0.1}
# matrices of a weight, their rows and columns
SHAPES = [
    (3, 32, 32),
    (1, 64, 32),
    (1, 32, 64),
    (1, 32, 32),
    (1, 64, 32),
    (1, 32, 27),
]
FILTERS = (32, 3, 3, 3)  # of the last


def split(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies: the first tensor in three parts, filters as a matrix."""
    first, *others = tensors
    parts = [*first.chunk(3), *others]
    return [part.detach().clone().flatten(min(1, part.ndim - 1)) for part in parts]


@pytest.mark.parametrize("batch", [None, 3 * 2048, 1 << 22])
def test_equals_torchs_muon_and_adamw_side_by_side(batch, monkeypatch):
    """In float64, one by one, as on CPUs, and batched, as on GPUs; an update is skipped."""
    monkeypatch.setattr(torch, "bfloat16", torch.float64)  # what both iterate in
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.double)
    if batch:
        monkeypatch.setattr(Tensor, "is_cpu", False)
        monkeypatch.setattr(muon, "BATCH", batch)
    torch.manual_seed(0)
    shapes = [(count * rows, columns) for count, rows, columns in SHAPES[:-1]]
    shapes += [FILTERS, (32,)]  # a bias, which AdamW updates
    ours = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    theirs = [nn.Parameter(part) for part in split(ours)]
    optimizer = Muon(
        [
            {"params": ours[:2], "lr": 1e-2},
            {"params": ours[2:]},
        ],
        dict(zip(ours[:-1], SHAPES, strict=True)),
        momentum=0.95,
        adamw_lr_scale=0.25,
        filters=True,
        **OPTIONS,
    )
    torchs_muon = torch.optim.Muon(
        [
            {"params": theirs[:4], "lr": 1e-2},
            {"params": theirs[4:-1]},
        ],
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
        **OPTIONS,
    )
    adamw = torch.optim.AdamW(
        theirs[-1:],
        lr=OPTIONS["lr"] / 4,
        weight_decay=OPTIONS["weight_decay"],
    )
    for step in range(5):  # the first gradients are 0
        for p in ours:
            p.grad = step * torch.randn_like(p)
        gradients = split([p.grad for p in ours])
        for p, gradient in zip(theirs, gradients, strict=True):
            p.grad = gradient
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        torchs_muon.step()
        adamw.step()
        # skipped
        ours[step].grad.fill_(torch.nan)
        optimizer.found_inf = torch.ones(())
        optimizer.step()
    found = split(ours)
    expected = [p.detach() for p in theirs]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_iterates_in_bfloat16_if_asked_on_a_cpu_with_instructions_for_it(monkeypatch):
    torch.manual_seed(0)
    matrix = torch.randn(32, 64)
    exact = orthogonalize([matrix], 32, False)[0]
    rounded = orthogonalize([matrix], 32, True)[0]
    error = (rounded - exact).norm() / exact.norm()
    assert 0.001 < error < 0.02
    monkeypatch.setattr("common.optim.muon.is_fast", lambda _: False)
    optimizer = Muon([matrix], {}, 0.9, bfloat16=True)
    assert not optimizer.bfloat16
