"""Estimate the memory, traffic and FLOPs of one of N GPUs in an optimizer step, on fake tensors."""

import multiprocessing
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.engine.amp import compute_dtype, name_dtype
from common.engine.engine import Engine
from common.engine.tensor_parallel.sharding import named_shards
from common.engine.upstream import ParallelMode, gpc
from common.files import Values
from common.model.build import build_on_meta
from common.model.ema import EmaHook
from common.model.flops import FlopCount
from common.planner.fake_launch import allow_fake_launches, fake_launch, reduce_without_waiting
from common.process import at_end
from common.training import build_training

# PyTorch's operation: its usual name, and the index of the message argument; of an all-to-all both,
# since the smaller one is the same on all ranks: Muon's matrices are shared out, or their shards
COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "alltoall_base_": ("all_to_all", 0, 1),
}
Route = tuple[str, tuple[int, ...]]  # a collective's name, and the global ranks that it joins


class Traffic(TorchDispatchMode):
    """Count this process's collectives within the context: ``calls`` and ``nbytes``, by `Route`.

    Includes forward and backward passes, DDP and the optimizer. Raises KeyError for a collective
    that is not in `COLLECTIVES`.
    """

    def __init__(self):
        super().__init__()
        self.calls: Counter[Route] = Counter()
        self.nbytes: Counter[Route] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function.namespace == "c10d" and function._opname != "barrier":
            # A barrier has no message. Any other that is not known raises KeyError: a silent 0
            # would make the mode look faster than it is.
            name, *messages = COLLECTIVES[function._opname]
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            route = name, tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            self.calls[route] += 1
            self.nbytes[route] += min(_nbytes(tree_leaves(args[index])) for index in messages)
        return function(*args, **(kwargs or {}))


class TensorMemory(TorchDispatchMode):
    """Track the storages created or resized within the context: ``live`` bytes, and their ``peak``.

    Includes tensors saved by autograd and fake tensors, but no kernel workspaces and no allocator
    overhead.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> Self:
        resize = UntypedStorage.resize_

        # FSDP resizes storages without a dispatch.
        def resize_and_follow(storage: UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._follow(storage)

        self._patch = mock.patch.object(UntypedStorage, "resize_", resize_and_follow)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *details: Any):
        super().__exit__(*details)
        self._patch.stop()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        outcome = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(outcome):
            if isinstance(leaf, Tensor):
                # The storage of a DTensor itself has the size of the full tensor.
                local = getattr(leaf, "_local_tensor", leaf)
                self._follow(local.untyped_storage())
        return outcome

    def _follow(self, storage: UntypedStorage) -> None:
        """Count the storage's bytes until it is freed."""
        address = storage._cdata
        size = storage.nbytes()
        if address not in self._sizes:
            # The address may be used again: it is forgotten when the storage is freed.
            weakref.finalize(storage, self._forget, address).atexit = False
        self.live += size - self._sizes.get(address, 0)
        self._sizes[address] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, address: int) -> None:
        self.live -= self._sizes.pop(address)


@dataclass(frozen=True)
class StepEstimate:
    """What one process holds, computes and sends in an optimizer step. Sizes are in bytes."""

    weights: int  # the parameters and their moving average
    optimizer: int  # its state
    gradients: int
    training_peak: int  # in the forward and backward passes
    update_peak: int
    flops: int  # in matrix products, recomputed ones included (`torch.utils.flop_counter`)
    calls: Counter  # number of collectives, by `Route`
    nbytes: Counter  # bytes in the collectives' messages, by `Route`
    data_ranks: tuple[int, ...]  # the data-parallel group of this process

    @property
    def peak(self) -> int:
        return max(self.training_peak, self.update_peak)

    @property
    def groups(self) -> int:
        """The number of groups of several ranks whose collectives a step has."""
        return len({ranks for _, ranks in self.calls if len(ranks) > 1})

    @property
    def activations(self) -> int:
        """Bytes at the peak that are neither weights, gradients nor optimizer state."""
        return max(0, self.peak - self.weights - self.gradients - self.optimizer)


def estimate_step(
    config: Values,
    processes: int,
    micro_batch: int,
    accumulation: int = 1,
    device: str = "cuda",
    image_size: int | None = None,
) -> StepEstimate:
    """Estimate rank 0 of ``processes`` in a step of ``accumulation`` micro-batches.

    ``config`` is a whole one, with ``parallel`` resolved; ``image_size`` is MODEL's by default.
    Takes seconds at most.
    Runs in a separate process, because `allow_fake_launches` patches PyTorch.
    """
    # The dtype is that of the cluster's device: this CPU's default may differ.
    fp16 = config["fp16"] or {}
    config = {**config, "fp16": {**fp16, "dtype": name_dtype(compute_dtype(fp16, device))}}
    size = image_size or config["MODEL"]["image_size"]
    return (
        _process(os.getpid())
        .submit(_estimate, config, processes, micro_batch, accumulation, device, size)
        .result()
    )


@cache
def _process(parent: int) -> ProcessPoolExecutor:
    """Return a process of ``parent`` to reuse: PyTorch's first use of fake tensors is slow."""
    # A fork cannot use CUDA, which autograd's threads try to, and has its parent's process group.
    start = "spawn" if torch.cuda.is_available() or dist.is_initialized() else "fork"
    pool = ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context(start), initializer=_prepare_process
    )
    at_end(pool.shutdown)
    at_end(_process.cache_clear)
    return pool


def _prepare_process() -> None:
    # Fake tensors have no fused SGD: PyTorch runs the true kernel, whose threads a fork lacks.
    torch.set_num_threads(1)
    allow_fake_launches()


def _estimate(
    config: Values,
    processes: int,
    micro_batch: int,
    accumulation: int,
    device: str,
    image_size: int,
) -> StepEstimate:
    depth = count_blocks(config["MODEL"])
    # A model of this many blocks is counted, and one with another; the rest is extrapolated.
    shallow = 1
    if config["MODEL"].get("drop_path"):
        shallow = 2  # The first block drops no paths.
    if config["zero"]:
        shallow = 3  # A block is gathered during another's backward pass.
    # These options of DDP need its own reduction, which the estimate replaces. They change nothing
    # that it counts.
    unused = dict(init_sync=False, find_unused_parameters=False, static_graph=False)
    launched = {
        **config,
        "torch_ddp": config["torch_ddp"] | unused,
        "GRAPHS": False,  # each estimate would say that there is no GPU
        # `_count_step` runs at most three: those between the first and the last are equal.
        "gradient_accumulation": min(accumulation, 3),
    }
    with fake_launch(launched, processes), _choosing_as_on(device):
        estimate = partial(_estimate_depth, config, micro_batch, accumulation, image_size)
        if depth <= shallow + 1:
            return estimate(depth)
        first = estimate(shallow)
        second = estimate(shallow + 1)
    return _extend(first, second, depth - shallow)


def count_blocks(model: Values) -> int:
    """Return the number of alike blocks that MODEL says; 0 if it says none, or one a stage."""
    depth = model.get("depth")
    return depth if isinstance(depth, int) else 0


def _extend(first: StepEstimate, second: StepEstimate, blocks: int) -> StepEstimate:
    """Extrapolate linearly: ``first`` plus ``blocks`` times its difference from ``second``."""

    def extended(name: str) -> Any:
        low = getattr(first, name)
        high = getattr(second, name)
        if isinstance(low, Counter):
            return Counter({key: low[key] + blocks * (high[key] - low[key]) for key in high})
        return low + blocks * (high - low) if isinstance(low, int) else low

    return StepEstimate(**{name: extended(name) for name in StepEstimate.__dataclass_fields__})


def _estimate_depth(
    config: Values, micro_batch: int, accumulation: int, image_size: int, depth: int
) -> StepEstimate:
    """Estimate a step of the model with ``depth`` blocks, 0 for those that it has."""
    model = build_on_meta(config["MODEL"] | ({"depth": depth} if depth else {}))
    with FakeTensorMode(), TensorMemory() as memory:
        _move_to_fake_cpu(model)
        # MixupLoss keeps one more tensor of the logits' size, which is not counted
        criterion = nn.CrossEntropyLoss(label_smoothing=config["LABEL_SMOOTHING"])
        model, optimizer, engine, *_ = build_training(config, criterion, model=model)
        reduce_without_waiting(engine)
        # The fused updates take a rate on the device, but not a fake one.
        engine.optimizer.has_device_rates = False
        engine.train()
        averages = EmaHook(model, config["EMA"]).averages if config["EMA"] else {}
        counts = _count_step(engine, memory, micro_batch, image_size, accumulation)
        state = _nbytes(value for state in optimizer.state.values() for value in state.values())
        # The first update creates the state: it was not there in the passes that were counted.
        counts["training_peak"] += state
        weights = _nbytes([*named_shards(model).values(), *averages.values()])
        data_ranks = tuple(gpc.get_ranks_in_group(ParallelMode.DATA))
        return StepEstimate(weights=weights, optimizer=state, data_ranks=data_ranks, **counts)


def _move_to_fake_cpu(model: nn.Module) -> None:
    """Replace the tensors of a model on the meta device by fake ones on the CPU, in place."""
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            fake = nn.Parameter(torch.empty(parameter.shape), parameter.requires_grad)
            setattr(layer, name, fake)
        for name, buffer in layer.named_buffers(recurse=False):
            layer._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _count_step(
    engine: Engine, memory: TensorMemory, micro_batch: int, image_size: int, accumulation: int
) -> dict[str, Any]:
    """Run an optimizer step; return its counts as `StepEstimate` has them."""
    flops = 0
    calls: Counter[Route] = Counter()
    nbytes: Counter[Route] = Counter()

    def train() -> None:
        engine.zero_grad()
        images = torch.empty(micro_batch, 3, image_size, image_size)
        labels = torch.zeros(micro_batch, dtype=torch.long)
        engine.backward(engine.criterion(engine(images), labels))  # pyright: ignore[reportOptionalCall]

    def count(part: Callable[[], None], times: int = 1) -> int:
        """Run ``part`` once and count it ``times``; return the peak of its memory."""
        nonlocal flops
        memory.peak = memory.live  # the peak of this part alone
        with Traffic() as traffic, FlopCount() as arithmetic:
            part()
        flops += times * arithmetic.total
        for route, number in traffic.calls.items():
            calls[route] += times * number
            nbytes[route] += times * traffic.nbytes[route]
        return memory.peak

    # The first may gather parameters, the last reduces gradients; those between are all equal.
    micro_batches = [1] * accumulation if accumulation < 3 else [1, accumulation - 2, 1]
    peaks = [count(train, times) for times in micro_batches]
    gradients = _nbytes(engine.optimizer.parameters)  # a gradient has its parameter's size
    update_peak = count(engine.step)
    return dict(
        flops=flops,
        calls=calls,
        nbytes=nbytes,
        gradients=gradients,
        training_peak=max(peaks),
        update_peak=update_peak,
    )


@contextmanager
def _choosing_as_on(device: str) -> Iterator[None]:
    """Make attention, LAMB, dropout's mask and norms behave as on ``device``.

    Fake tensors cannot be on "cuda" themselves, because autograd asks the driver for the device.
    """
    if device == "cpu":
        yield
        return
    layer_norm = partial(_layer_norm_as_on_a_gpu, F.layer_norm)
    functions = mock.patch.multiple(
        F, dropout=_dropout_by_mask, layer_norm=layer_norm, rms_norm=_rms_norm_as_on_a_gpu
    )
    # Our layers and optimizers choose the way for a CPU by `is_cpu`.
    with mock.patch.object(Tensor, "is_cpu", False), functions:
        yield


def _dropout_by_mask(x: Tensor, p: float, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop out as a GPU does, which keeps a mask of a byte a value."""
    return torch.native_dropout(x, p, training)[0] if training and p else x


def _layer_norm_as_on_a_gpu(
    layer_norm: Callable[..., Tensor], x: Tensor, *args: Any, **options: Any
) -> Tensor:
    """Compute in float32 under autocast, as CUDA's does and the CPU's does not."""
    x = x.float() if torch.is_autocast_enabled("cpu") else x
    return layer_norm(x, *args, **options)


def _rms_norm_as_on_a_gpu(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> Tensor:
    """Keep the input for the backward pass, as layer norm; a CPU keeps the normalized one too."""
    return F.layer_norm(x, shape, weight, None, eps)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
