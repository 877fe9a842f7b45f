"""Tensor-parallel ranks share the decoding: each decodes some rows of the group's micro-batches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Sharing:
    """A rank of a tensor-parallel group; by default there is no other.

    The collectives are issued by the main thread, between the steps', so that all ranks have them
    in one order; a loader's thread that runs ahead issues none.
    """

    rank: int = 0
    size: int = 1
    group: "ProcessGroup | None" = None  # of tensors on the device
    cpu_group: "ProcessGroup | None" = None  # of Python objects

    def rows(self, total: int) -> np.ndarray:
        """Return which of ``total`` rows this rank decodes, int64, equally many on each rank.

        They are consecutive. Those from ``total`` on are padding.
        """
        count = -(-total // self.size)
        return self.rank * count + np.arange(count)

    def gather(self, tensor: "Tensor", total: int) -> "Tensor":
        """Return the ``total`` rows, given this rank's."""
        # Here, as the process that reads records shares nothing, and torch takes 2 s to import.
        import torch.distributed as dist

        whole = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        dist.all_gather_into_tensor(whole, tensor.contiguous(), group=self.group)
        return whole[:total]

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the ``value`` of each rank."""
        import torch.distributed as dist

        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values


ALONE = Sharing()
