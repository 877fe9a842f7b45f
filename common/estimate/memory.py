"""Measure the memory of tensors."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Track the storages created within the context: ``live`` bytes, and their ``peak``.

    Includes tensors saved by autograd and fake tensors, but no kernel workspaces and no allocator overhead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        outcome = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(outcome):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        return outcome

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._sizes:
            return
        self._sizes[address] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, address).atexit = False

    def _forget(self, address: int) -> None:
        self.live -= self._sizes.pop(address)

    def restart_peak(self) -> None:
        """Reset the peak."""
        self.peak = self.live
