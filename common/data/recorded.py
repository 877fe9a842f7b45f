"""A function of a batch's tensors that a GPU replays by one launch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.recording import RECORDINGS, Recording

Tensors = tuple[Tensor, ...]


@dataclass
class _Call:
    """A function's inputs of one shape, where the recording reads them, and its results there."""

    inputs: Tensors
    recording: Recording | None = None
    results: Tensors = ()


class Recorded:
    """Call ``function``, with ``graphs`` on a GPU as a CUDA graph.

    The first call with the inputs' shapes and ``settings`` runs the function as it is, and the
    second records it. The results are the same, in memory of their own. All calls must be on one
    stream, and nothing in the function may depend on values of its inputs, except the results.
    """

    def __init__(self, function: Callable[..., Tensors], device: torch.device, graphs: bool):
        self.function = function
        self.build = RECORDINGS["cuda"] if graphs and device.type == "cuda" else None
        self.calls: dict[Any, _Call] = {}

    def __call__(self, *inputs: Tensor, **settings: Any) -> Tensors:
        if not self.build:
            return self.function(*inputs, **settings)
        key = *(tensor.shape for tensor in inputs), *settings.values()
        call = self.calls.get(key)
        if not call:
            call = self.calls[key] = _Call(tuple(tensor.clone() for tensor in inputs))
            return self.function(*call.inputs, **settings)
        for there, tensor in zip(call.inputs, inputs, strict=True):
            there.copy_(tensor)
        if not call.recording:
            call.recording = self.build()
            call.results = call.recording.record(partial(self.function, *call.inputs, **settings))
        call.recording.replay()
        # The next replay overwrites the results.
        return tuple(tensor.clone() for tensor in call.results)
