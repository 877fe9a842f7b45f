"""A recording for CPUs, in place of a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from common.recording import Result

aten = torch.ops.aten
# Those whose result the host needs, which a graph cannot record.
REFUSED = {aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten.bincount}


class TapeRecording:
    """The operations of a function with their tensors, called again in a replay.

    As a CUDA graph it keeps the numbers of the host, reads and writes the same memory in each
    replay, and refuses an operation that waits. Unlike one it runs the function when it records:
    so the first replay does nothing.
    """

    def __init__(self, beside: "TapeRecording | None" = None):
        self.tape: list[tuple[Any, Any, Any, list[Any]]] = []
        self.has_run = False

    def record(self, function: Callable[[], Result]) -> Result:
        with _Tape(self.tape):
            result = function()
        self.has_run = True
        return result

    @torch.no_grad()
    def replay(self) -> None:
        if self.has_run:
            self.has_run = False
            return
        for operation, args, kwargs, outputs in self.tape:
            again = tree_leaves(operation(*args, **kwargs))
            # Of an operation in place the result is there already.
            for new, old in zip(again, outputs, strict=True):
                if isinstance(old, Tensor) and new is not old:
                    old.copy_(new)


class _Tape(TorchDispatchMode):
    def __init__(self, tape: list[tuple[Any, Any, Any, list[Any]]]):
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operation._overloadpacket in REFUSED:
            raise RuntimeError(f"{operation} waits for its result, which no graph can record")
        result = operation(*args, **kwargs)
        is_view = operation.is_view or torch.Tag.inplace_view in operation.tags
        if not is_view and operation is not aten.detach.default:
            # Views: the function may change the shape of a result in place, as unsqueeze_ does.
            outputs = tree_leaves(tree_map_only(Tensor, torch.detach, result))
            self.tape.append((operation, args, kwargs, outputs))
        return result
