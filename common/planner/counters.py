"""Count what a step allocates and sends."""

import weakref
from collections import Counter
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# PyTorch's operation: its usual name, and the index of the message argument
COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
}
Route = tuple[str, tuple[int, ...]]  # a collective's name, and the global ranks that it joins


class Traffic(TorchDispatchMode):
    """Count this process's collectives within the context: ``calls`` and message ``nbytes``, by `Route`.

    Includes forward and backward passes, DDP and the optimizer. Raises KeyError for a collective that is not in
    `COLLECTIVES`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Route] = Counter()
        self.nbytes: Counter[Route] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.namespace == "c10d" and function._opname not in ("barrier", "monitored_barrier_"):
            name, message = COLLECTIVES[function._opname]
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            route = name, tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            self.calls[route] += 1
            self.nbytes[route] += sum(leaf.nbytes for leaf in tree_leaves(args[message]) if isinstance(leaf, Tensor))
        return function(*args, **(kwargs or {}))


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
