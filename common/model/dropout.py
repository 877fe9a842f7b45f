"""Dropout whose mask is cheap to draw on a CPU."""

import torch
from torch import Tensor, nn

LEVELS = 1 << 16  # 16 random bits decide over a value


class Dropout(nn.Dropout):
    """`nn.Dropout`, except for the order in which training on a CPU takes random numbers from the default generator.

    PyTorch draws one Bernoulli number per value there, which takes longer than a block's matrix products in bfloat16.
    Here a 64-bit random integer decides over four values. ``p`` is rounded to a multiple of 1/65536; the values that
    are kept are scaled by the inverse of their exact probability.
    """

    def __init__(self, p: float) -> None:
        super().__init__(p)

    def forward(self, x: Tensor) -> Tensor:
        kept = round((1 - self.p) * LEVELS)
        cuts_bits = self.training and 0 < kept < LEVELS and x.is_cpu and not torch.compiler.is_compiling()
        return _drop(x, kept) if cuts_bits else super().forward(x)


def _drop(x: Tensor, kept: int) -> Tensor:
    """Return ``x`` with each value kept with probability ``kept / LEVELS``, and scaled by the inverse of that."""
    count = x.numel()
    # without a lower bound, the sign bit would never be set
    bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    # in place and without bool tensors, which PyTorch converts slowly
    mask = bits.lt_(kept - LEVELS // 2)[:count].view(x.shape).to(x.dtype)
    return (x * mask).mul_(LEVELS / kept)
