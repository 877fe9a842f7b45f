"""What a GPU is told to do, recorded once and replayed by one launch: CUDA graphs."""

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

Result = TypeVar("Result")
# While a stream is recorded, nothing may synchronise the device, as the start of another recording
# does: of two threads one waits.
_RECORDING = threading.Lock()


class Recording(Protocol):
    """Record what a function launches, then launch it as often as `replay` is called.

    A replay reads and writes the same memory every time: a function's inputs have to be copied to
    the tensors that it read when it was recorded, and numbers of the host, such as a rate, stay
    what they were. The function must not wait for the device, and its shapes must not depend on
    values. It has to have run before, on the same stream, so that all that lasts is allocated.
    """

    def record(self, function: Callable[[], Result]) -> Result:
        """Call ``function``, but run nothing; return its result, whose tensors a replay fills."""
        ...

    def replay(self) -> None: ...


class CudaRecording:
    """A CUDA graph of the current stream, which must not be the default stream.

    With ``beside`` it shares the memory of that earlier recording, whose next replay may overwrite
    the results of this one. The two must be replayed on one stream.
    """

    def __init__(self, beside: "CudaRecording | None" = None):
        self.graph = torch.cuda.CUDAGraph()
        self.pool: Any = beside and beside.graph.pool()

    def record(self, function: Callable[[], Result]) -> Result:
        stream = torch.cuda.current_stream()
        # "thread_local": meanwhile another thread may allocate, which "global" forbids.
        capture = torch.cuda.graph(self.graph, self.pool, stream, capture_error_mode="thread_local")
        with _RECORDING, capture:
            return function()

    def replay(self) -> None:
        self.graph.replay()


# How each type of device records. Tests add a CPU.
RECORDINGS: dict[str, Callable[..., Recording]] = {"cuda": CudaRecording}
