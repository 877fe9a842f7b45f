"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): orthogonalized momentum,
for matrices.

Momentum SGD steps along the average gradient of a matrix. A few of that average's singular values
are often far larger than the others, so that nearly all of a step goes in a few directions. Muon
replaces the average U S V^T by U V^T: a step of the same length in every direction.

A singular value decomposition is slow on a GPU. The Newton-Schulz iteration needs only matrix
products: x <- a x + b (x x^T) x + c (x x^T)^2 x maps each singular value s to a s + b s^3 + c s^5
and keeps U and V. After five iterations all values between 0.001 and 1 are about 0.7 to 1.2.

These products are small: a block of width 192 has them of 192 x 192, which a GPU computes in less
time than it takes to launch them. All matrices of one shape, of all blocks, are therefore computed
by the same launches, up to `BATCH` numbers at a time, which bounds the memory.

All other parameters are updated by AdamW. One learning rate serves both: the root mean square of an
update is 0.2 for either (Moonlight, arXiv 2502.16982; ``match_rms_adamw`` of `torch.optim.Muon`).
With few steps, AdamW's may have to be lower: `adamw_lr_scale`.

Shape suffixes: K matrices, M rows, N columns.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from common.hardware import is_fast
from common.optim.sgd import needs_unfused_sgd

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # a, b, c above, as in torch.optim.Muon
ITERATIONS = 5
EPS = 1e-7  # least norm that a matrix is divided by
BATCH = 1 << 22  # numbers that are orthogonalized together; about 12 bytes of memory each

# Applies a function of full matrices to shards, given the function, the parameters and their
# shards; returns shards.
MapFull = Callable[
    [Callable[[list[Tensor]], Sequence[Tensor]], list[Tensor], list[Tensor]], Sequence[Tensor]
]


class Muon(AdamW):
    """Update the `matrices` by Muon, all other parameters by PyTorch's fused AdamW at
    `adamw_lr_scale` times the rate.

    `matrices` maps a parameter to (K, M, N): it is a stack of K matrices along dimension 0, [K * M,
    N] before it is sharded, which are orthogonalized separately. The filters of a convolution are
    one matrix, whose N are all dimensions but the first; they are left to AdamW unless `filters`.
    Weight decay is decoupled in both.
    The state of a matrix is `momentum_buffer`, that of other parameters AdamW's. An attribute
    `found_inf`, a 0-dim float32 tensor, makes `step` change nothing where it is 1. Under tensor
    parallelism and ZeRO `map_full` gathers all matrices of one shape at once, and each rank
    computes a part.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        params: ParamsT,
        matrices: Mapping[Tensor, tuple[int, int, int]],
        momentum: float,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_lr_scale: float = 1.0,
        bfloat16: bool = False,
        filters: bool = False,
        map_full: MapFull | None = None,
    ):
        # Only the fused AdamW reads `found_inf` on the device.
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)
        self.matrices = {p: matrix for p, matrix in matrices.items() if p.ndim == 2 or filters}
        self.momentum = momentum
        self.adamw_lr_scale = adamw_lr_scale
        # Without its instructions a CPU would take hundreds of times as long.
        self.bfloat16 = bfloat16 and is_fast("bfloat16")
        self.map_full = map_full

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        gradients = {
            p: p.grad
            for group in self.param_groups
            for p in group["params"]
            if p in self.matrices and p.grad is not None
        }
        self._step_adamw(gradients)
        by_shape = defaultdict(list)
        # Stacks of equal size side by side: ranks that take turns have equally much to do.
        for p in sorted(gradients, key=lambda p: self.matrices[p]):
            by_shape[self.matrices[p][1:]].append(p)
        for alike in by_shape.values():
            for batch in [alike[::-1]] if self.map_full else _batches(alike):
                self._step_muon(batch, [gradients[p] for p in batch])

    def update_norms(self) -> dict[Tensor, Tensor]:
        """Return the norm of each matrix's update, of a shard its part, up to a common factor."""
        # All updates have one root mean square.
        return {p: torch.full((), sqrt(p.numel()), device=p.device) for p in self.matrices}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore ``state``; AdamW's own looks for a step in that of every parameter."""
        Optimizer.__setstate__(self, state)

    def _step_adamw(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Update what is no matrix."""
        for p in gradients:
            p.grad = None  # AdamW leaves out a parameter without a gradient
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            # Not in place: the rate may be a tensor.
            group["lr"] = group["lr"] * self.adamw_lr_scale
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        for p, gradient in gradients.items():
            p.grad = gradient

    def _step_muon(self, batch: list[Tensor], gradients: list[Tensor]) -> None:
        """Update matrices of one shape."""
        rows = self.matrices[batch[0]][1]
        directions = self._accumulate(batch, gradients)
        function = partial(orthogonalize, rows=rows, bfloat16=self.bfloat16)
        if self.map_full is None:
            updates = function(directions)
        else:
            updates = self.map_full(
                lambda full: [*chain(*map(function, _batches(full)))], batch, directions
            )
        update_of = dict(zip(batch, updates, strict=True))
        for group in self.param_groups:
            params = [p for p in group["params"] if p in update_of]
            if params:
                self._descend(
                    params, [update_of[p] for p in params], group["lr"], group["weight_decay"]
                )

    def _accumulate(self, params: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Advance the momentum; return Nesterov's look-ahead of it."""
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in params]
        # The same as momenta.lerp_(gradients, 1 - self.momentum), except that found_inf skips it.
        self._descend(momenta, gradients, lr=self.momentum - 1, weight_decay=-1.0)
        return list(torch._foreach_lerp(gradients, momenta, self.momentum))

    def _descend(
        self,
        tensors: list[Tensor],
        directions: list[Tensor],
        lr: float | Tensor,
        weight_decay: float,
    ) -> None:
        """Subtract lr (direction + weight_decay tensor) from each tensor, unless `found_inf` is 1.

        By PyTorch's fused SGD: one launch for all tensors, and the host does not read `found_inf`.
        """
        if needs_unfused_sgd(tensors[0]):
            if self.found_inf is None or not self.found_inf:
                rate = float(lr)
                torch._foreach_mul_(tensors, 1 - rate * weight_decay)
                torch._foreach_add_(tensors, directions, alpha=-rate)
            return
        torch._fused_sgd_(
            tensors,
            directions,
            [],  # no momentum of its own: `_accumulate` has applied it
            weight_decay=weight_decay,
            momentum=0.0,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            found_inf=self.found_inf,
        )


def _batches(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors that are computed together: at most `BATCH` numbers, or one tensor.

    On a CPU always one, so that a matrix is still in the cache for its next product.
    """
    batch: list[Tensor] = []
    for tensor in tensors:
        limit = 0 if tensor.is_cpu else BATCH
        if batch and sum(map(Tensor.numel, (*batch, tensor))) > limit:
            yield batch
            batch = []
        batch.append(tensor)
    yield batch


def orthogonalize(stacks: list[Tensor], rows: int, bfloat16: bool = False) -> Sequence[Tensor]:
    """Return U V^T of each matrix U S V^T of M = `rows` rows, times 0.2 sqrt(max(M, N)).

    `stacks` are stacks of such matrices, [K * M, N] with a K of each, or [M, ...] filters. Five
    Newton-Schulz iterations bring the singular values to about 0.7 to 1.2: on a GPU in bfloat16, as
    `torch.optim.Muon`, on a CPU in the dtype of `stacks` unless ``bfloat16``. The results are views
    of one tensor.
    """
    a, b, c = COEFFICIENTS
    dtype, lengths = stacks[0].dtype, [len(stack) for stack in stacks]
    x_KMN = torch.cat([stack.flatten(1) for stack in stacks]).unflatten(0, (-1, rows))
    if bfloat16 or not x_KMN.is_cpu:
        x_KMN = x_KMN.bfloat16()
    columns = x_KMN.shape[2]
    # The norm bounds the singular values: the iteration needs them to be at most 1.
    x_KMN = x_KMN / x_KMN.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        # (x x^T) x = x (x^T x): take the smaller of the two products.
        if rows <= columns:
            gram_KMM = torch.bmm(x_KMN, x_KMN.mT)
            factor_KMM = torch.baddbmm(gram_KMM, gram_KMM, gram_KMM, beta=b, alpha=c)
            x_KMN = torch.baddbmm(x_KMN, factor_KMM, x_KMN, beta=a)
        else:
            gram_KNN = torch.bmm(x_KMN.mT, x_KMN)
            factor_KNN = torch.baddbmm(gram_KNN, gram_KNN, gram_KNN, beta=b, alpha=c)
            x_KMN = torch.baddbmm(x_KMN, x_KMN, factor_KNN, beta=a)
    # An orthogonal matrix has entries of RMS 1 / sqrt(max(M, N)): this makes it 0.2, as AdamW's.
    x_KMN = x_KMN.to(dtype).mul_(0.2 * sqrt(max(rows, columns)))
    updates = x_KMN.flatten(0, 1).split(lengths)
    return [update.view_as(stack) for update, stack in zip(updates, stacks, strict=True)]
