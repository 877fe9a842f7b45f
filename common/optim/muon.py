"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): orthogonalized momentum,
for matrices.

All other parameters are updated by AdamW. One learning rate serves both: the root mean square of an
update is 0.2 for either (Moonlight, arXiv 2502.16982; ``match_rms_adamw`` of `torch.optim.Muon`).
With few steps, AdamW's may have to be lower: `adamw_lr_scale`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the Newton-Schulz iteration, as in torch.optim.Muon
ITERATIONS = 5
EPS = 1e-7  # least norm that a matrix is divided by

# Applies functions of whole matrices, given parameters and what this rank holds of each matrix;
# returns its shards.
MapWhole = Callable[[list[Callable[[Tensor], Tensor]], list[Tensor], list[Tensor]], list[Tensor]]


def count_matrices(name: str, shape: Sequence[int] = (3, 1)) -> int:
    """Return how many matrices a block's parameter holds along dimension 0, 3 of queries, keys and
    values; 0: none.
    """
    layer = re.search(
        r"(?:^|\.)blocks\.\d+\.(attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.weight$", name
    )
    if layer is None or len(shape) != 2:
        return 0
    if layer[1] != "attn.qkv":
        return 1
    # of timm's, some blocks of GC ViT have no queries, and TinyViT's three have a third of the
    # heads each
    return 2 if shape[0] == 2 * shape[1] else 3


class Muon(AdamW):
    """Update the `matrices` by Muon, all other parameters by PyTorch's fused AdamW at
    `adamw_lr_scale` times the rate.

    `matrices` says how many matrices a parameter holds along dimension 0, which are orthogonalized
    separately. Weight decay is decoupled in both. The state of a matrix is `momentum_buffer`, that
    of other parameters AdamW's. An attribute `found_inf`, a 0-dim float32 tensor, makes `step`
    change nothing where it is 1. Under tensor parallelism and ZeRO `map_whole` gathers the
    matrices.
    """

    def __init__(
        self,
        params: ParamsT,
        matrices: Mapping[Tensor, int],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        adamw_lr_scale: float = 1.0,
        map_whole: MapWhole | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)
        self.matrices, self.momentum, self.adamw_lr_scale = matrices, momentum, adamw_lr_scale
        self.map_whole = map_whole or _map_here

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        own = [
            (p, group) for group in self.param_groups for p in group["params"] if p in self.matrices
        ]
        trained = [(p, p.grad, group) for p, group in own if p.grad is not None]
        for p, _, _ in trained:
            p.grad = None  # AdamW leaves it alone
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= self.adamw_lr_scale
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        for p, gradient, _ in trained:
            p.grad = gradient
        directions = [self._accumulate(p, gradient) for p, gradient, _ in trained]
        functions = [partial(orthogonalize, stacked=self.matrices[p]) for p, _, _ in trained]
        updates = self.map_whole(functions, [p for p, _, _ in trained], directions)
        for (p, _, group), update in zip(trained, updates, strict=True):
            decayed = p * (1 - group["lr"] * group["weight_decay"])
            p.copy_(self._unless_skipped(decayed.sub_(update, alpha=group["lr"]), p))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore ``state``; AdamW's own looks for a step in that of every parameter."""
        Optimizer.__setstate__(self, state)

    def _accumulate(self, p: Tensor, gradient: Tensor) -> Tensor:
        """Advance the momentum; return Nesterov's look-ahead of it."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        momentum = state["momentum_buffer"].lerp(gradient, 1 - self.momentum)
        state["momentum_buffer"].copy_(self._unless_skipped(momentum, state["momentum_buffer"]))
        return gradient.lerp(momentum, self.momentum)

    def _unless_skipped(self, new: Tensor, old: Tensor) -> Tensor:
        found_inf = getattr(self, "found_inf", None)
        return new if found_inf is None else torch.where(found_inf.bool(), old, new)


def orthogonalize(whole: Tensor, stacked: int = 1) -> Tensor:
    """Return U V^T of each of the `stacked` matrices U S V^T in `whole` [stacked * M, N], times 0.2
    sqrt(max(M, N)).

    Five Newton-Schulz iterations bring the singular values to about 0.7 to 1.2: on a GPU in
    bfloat16, as `torch.optim.Muon`, on a CPU in the dtype of `whole`.
    """
    a, b, c = COEFFICIENTS
    parts = whole.unflatten(0, (stacked, -1))
    rows, columns = parts.shape[1:]
    x = parts if whole.is_cpu else parts.bfloat16()
    x = x.mT if rows > columns else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if rows > columns else x
    return (0.2 * sqrt(max(rows, columns)) * x.to(whole.dtype)).flatten(0, 1)


def _map_here(
    functions: list[Callable[[Tensor], Tensor]], _: list[Tensor], wholes: list[Tensor]
) -> list[Tensor]:
    return [function(whole) for function, whole in zip(functions, wholes, strict=True)]
