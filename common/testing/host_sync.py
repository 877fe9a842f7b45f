"""Forbid what makes the host wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Their outcome, or its shape, is a number that the host needs.
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
    """Raise RuntimeError within the context where the host waits for ``device``: on a CPU, where it would for a GPU.

    A CPU's tensors count as a GPU's: what is on the host by intent must not be touched. That a copy to the GPU is
    waited for shows only there.
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
