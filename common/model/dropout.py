"""Dropout with a cheap mask on CPUs."""

import torch
from torch import Tensor, nn

LEVELS = 1 << 16  # 16 random bits per value


class Dropout(nn.Dropout):
    """`nn.Dropout`, except that on CPUs it draws other random numbers.

    PyTorch draws one Bernoulli number per value on CPUs, which takes longer than a block's matrix products in bfloat16.
    Here a 64-bit random integer serves four values. ``p`` is rounded to a multiple of 1/65536; kept values are scaled
    by the inverse of the exact keep probability.
    """

    def __init__(self, p: float) -> None:
        super().__init__(p)

    def forward(self, x: Tensor) -> Tensor:
        kept = round((1 - self.p) * LEVELS)
        cuts_bits = self.training and 0 < kept < LEVELS and x.is_cpu and not torch.compiler.is_compiling()
        return _drop(x, kept) if cuts_bits else super().forward(x)


def _drop(x: Tensor, kept: int) -> Tensor:
    """Keep each value of ``x`` with probability ``kept / LEVELS``, scaled by the inverse."""
    count = x.numel()
    # the default lower bound, 0, would never set the sign bit
    bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    # in place and without bool tensors, which PyTorch converts slowly
    mask = bits.lt_(kept - LEVELS // 2)[:count].view(x.shape).to(x.dtype)
    return (x * mask).mul_(LEVELS / kept)
