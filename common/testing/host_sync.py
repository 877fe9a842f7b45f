"""Forbid operations that make the host wait for a GPU."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# the host needs their result, or its shape
WAITING = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.bincount, aten._unique2}


class ForbidWaiting(TorchDispatchMode):
    """Raise RuntimeError if the host would wait for a GPU in this context; a CPU's tensors count as a GPU's.

    Copies to the GPU that are waited for show only on a GPU.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        masked = function._overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if masked or function._overloadpacket in WAITING:
            raise RuntimeError(f"{function} would wait for a GPU")
        return function(*args, **(kwargs or {}))
