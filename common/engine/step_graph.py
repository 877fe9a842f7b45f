"""A training step recorded once and replayed: three graphs in place of hundreds of launches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from common.engine.step_optimizer import StepOptimizer
from common.engine.upstream import ParallelMode, gpc
from common.errors import UserError
from common.launchers import is_first_process
from common.recording import RECORDINGS, Recording, Result
from common.text import first_line, print_wrapped

# Steps that run as they are, before the recording: they compile, and allocate all that lasts.
WARM_UP = 3


def build_step_graphs(
    wanted: bool, device: torch.device, optimizer: StepOptimizer
) -> "StepGraphs | None":
    """Build what records the steps, from the config's ``GRAPHS``, or say why it is not possible."""
    if not wanted:
        return None
    ranks = gpc.get_world_size(ParallelMode.GLOBAL)
    reason = ""
    if device.type not in RECORDINGS:
        reason = "no GPU"
    elif ranks > 1:
        # Collectives, of DDP, ZeRO and tensor parallelism, were not recorded yet.
        reason = f"{ranks} processes"
    elif not optimizer.skips_on_device:
        reason = f"{type(optimizer.optim).__name__} cannot skip an update on the device"
    if reason:
        say_plain(reason)
        return None
    return StepGraphs(device)


def say_plain(reason: str) -> None:
    if is_first_process():
        print_wrapped(f"training runs without CUDA graphs: {reason}")


class StepGraphs:
    """Record the parts of `Engine.train_step`, and replay them in all further steps.

    The parts are the first micro-batch of a step, which makes the gradients, further ones, which
    add to them, and the update. So hooks run between micro-batches as without graphs. They share
    their memory. Batches of another shape, as those of a new image size, begin anew.

    What a recording would keep in silence is in ``key``: the batch's shapes and what else the host
    decides. Rates change with every step: `StepOptimizer.load_rates` copies them to the device.
    """

    def __init__(self, device: torch.device):
        self.recording = RECORDINGS[device.type]
        # Autograd runs a gradient's accumulation on the stream of the forward pass, which must be
        # the recorded one: the steps before the recording run there too.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.key: Any = None

    def load(self, batch: Any, settings: Any) -> Any:
        """Copy ``batch`` to the memory that the graphs read, and return it there.

        Other shapes or ``settings`` than those of the last batch begin anew.
        """
        leaves, structure = tree_flatten(batch)
        key = structure, [_shape(leaf) for leaf in leaves], settings
        if key != self.key:
            self.key = key
            self.steps = 0
            self.parts: dict[str, Recording] = {}
            self.results: dict[str, Any] = {}
            self.batch = tree_map_only(Tensor, torch.clone, batch)
            return self.batch
        for there, leaf in zip(tree_flatten(self.batch)[0], leaves, strict=True):
            if isinstance(leaf, Tensor):
                there.copy_(leaf)
        return self.batch

    def run(self, part: str, function: Callable[[], Any]) -> Any:
        """Run ``function``, a part of a step, or replay it."""
        if self.steps < WARM_UP:
            result = self.on_stream(function)
        else:
            if part not in self.parts:
                self.on_stream(partial(self._record, part, function))
            self.parts[part].replay()
            result = self.results[part]
        self.steps += part == "update"
        # Without the graph of autograd, which would keep its stream.
        return tree_map_only(Tensor, Tensor.detach, result)

    def _record(self, part: str, function: Callable[[], Any]) -> None:
        first = next(iter(self.parts.values()), None)
        recording = self.recording(beside=first)
        try:
            self.results[part] = recording.record(function)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UserError(
                f"GRAPHS=True: this step cannot be recorded as a CUDA graph ({first_line(error)}): "
                "add --set GRAPHS=False"
            ) from error
        self.parts[part] = recording

    def on_stream(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` on the stream that records."""
        if self.stream is None:
            return function()
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = function()
        current.wait_stream(self.stream)
        return result


def _shape(leaf: Any) -> Any:
    """Return what of a batch's leaf a recording keeps: of a number, its value."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
