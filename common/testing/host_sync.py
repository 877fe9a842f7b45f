"""Forbid operations that make the host wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# the host needs their result, or its shape
WAITING = {
    aten._local_scalar_dense,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten.bincount,
    aten._unique2,
}


@contextmanager
def forbid_waiting(device: torch.device) -> Iterator[None]:
    """Raise RuntimeError if the host waits for ``device`` in this context; on a CPU, if it would wait for a GPU.

    A CPU's tensors count as a GPU's. Copies to the GPU that are waited for show only on a GPU.
    """
    if device.type != "cuda":
        with _NoWaiting():
            yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class _NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        masked = function._overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if masked or function._overloadpacket in WAITING:
            raise RuntimeError(f"{function} would wait for a GPU")
        return function(*args, **(kwargs or {}))
