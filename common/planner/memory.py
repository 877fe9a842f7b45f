"""Measure the memory of tensors."""

import weakref
from typing import Any, Self
from unittest import mock

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Track the storages created or resized within the context: ``live`` bytes, and their ``peak``.

    Includes tensors saved by autograd and fake tensors, but no kernel workspaces and no allocator overhead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> Self:
        resize = UntypedStorage.resize_

        def follow(storage: UntypedStorage, size: int) -> None:  # which FSDP calls without a dispatch
            resize(storage, size)
            self._follow(storage)

        self._patch = mock.patch.object(UntypedStorage, "resize_", follow)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._patch.stop()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        outcome = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(outcome):
            if isinstance(leaf, Tensor):
                self._follow(getattr(leaf, "_local_tensor", leaf).untyped_storage())  # a DTensor's says its whole size
        return outcome

    def _follow(self, storage: UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address not in self._sizes:
            weakref.finalize(storage, self._forget, address).atexit = False
        self.live += size - self._sizes.get(address, 0)
        self._sizes[address] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, address: int) -> None:
        self.live -= self._sizes.pop(address)

    def restart_peak(self) -> None:
        """Reset the peak."""
        self.peak = self.live
