"""Estimate the memory, traffic and FLOPs of one of N GPUs in an optimizer step, on fake tensors."""

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from common.colossal import (
    Engine,
    ParallelMode,
    allow_fake_launches,
    fake_launch,
    gpc,
    named_shards,
    reduce_without_waiting,
)
from common.hardware import is_gpu_older_than_bfloat16
from common.model.ema import EmaHook
from common.model.flops import FlopCount
from common.model.training import build_training
from common.model.vit import build_model
from common.planner.memory import TensorMemory
from common.planner.traffic import Traffic


@dataclass(frozen=True)
class StepEstimate:
    """One process's optimizer step.

    Attributes:
        weights, optimizer: bytes of the parameters (with their moving average) and of the optimizer state.
        gradients: bytes of all gradients.
        training_peak, update_peak: peak bytes in the forward and backward passes and in the update.
        flops: of matrix products, including recomputed ones (`torch.utils.flop_counter`).
        calls, nbytes: of collectives, by `Route`.
        data_ranks: the data-parallel group of this process.
    """

    weights: int
    optimizer: int
    gradients: int
    training_peak: int
    update_peak: int
    flops: int
    calls: Counter
    nbytes: Counter
    data_ranks: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max(self.training_peak, self.update_peak)

    @property
    def activations(self) -> int:
        """Bytes at the peak that are neither weights, gradients nor optimizer state."""
        return max(0, self.peak - self.weights - self.gradients - self.optimizer)


def estimate_step(
    config: Mapping[str, Any], processes: int, micro_batch: int, accumulation: int = 1, device: str = "cuda"
) -> StepEstimate:
    """Estimate rank 0 of ``processes`` in a step of ``accumulation`` micro-batches on a "cuda" or "cpu" device.

    ``config`` is a whole one, with ``parallel`` resolved. Takes seconds at most.
    Runs in a separate process, because `allow_fake_launches` patches PyTorch.
    """
    config = {**config, "fp16": _precision(config["fp16"], device)}
    return _process(os.getpid()).submit(_estimate_step, config, processes, micro_batch, accumulation, device).result()


@cache
def _process(parent: int) -> ProcessPoolExecutor:
    """Return a process of ``parent`` to reuse: PyTorch's first use of fake tensors is slow."""
    start = "spawn" if torch.cuda.is_available() else "fork"  # a fork cannot use CUDA, and autograd's threads try to
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(start), initializer=allow_fake_launches)


def _estimate_step(
    config: Mapping[str, Any], processes: int, micro_batch: int, accumulation: int, device: str
) -> StepEstimate:
    with fake_launch(_launch_config(config, accumulation), processes), _choosing_as_on(device):
        return _estimate_all_blocks(config, micro_batch, accumulation)


def _estimate_all_blocks(config: Mapping[str, Any], micro_batch: int, accumulation: int) -> StepEstimate:
    depth = config["MODEL"]["depth"]
    # blocks; the first one drops no paths, and `zero` gathers a block during another's backward pass
    shallow = 3 if config["zero"] else 2 if config["MODEL"]["drop_path"] else 1
    if depth <= shallow + 1:
        return _estimate_depth(config, depth, micro_batch, accumulation)
    first, second = (_estimate_depth(config, blocks, micro_batch, accumulation) for blocks in (shallow, shallow + 1))
    return _extend(first, second, depth - shallow)


def _extend(first: StepEstimate, second: StepEstimate, blocks: int) -> StepEstimate:
    """Extrapolate linearly: ``first`` plus ``blocks`` times its difference from ``second``."""

    def extended(name: str) -> Any:
        low, high = getattr(first, name), getattr(second, name)
        if isinstance(low, Counter):
            return Counter({key: low[key] + blocks * (high[key] - low[key]) for key in high})
        return low + blocks * (high - low) if isinstance(low, int) else low

    return StepEstimate(**{name: extended(name) for name in StepEstimate.__dataclass_fields__})


def _estimate_depth(config: Mapping[str, Any], depth: int, micro_batch: int, accumulation: int) -> StepEstimate:
    with torch.device("meta"):  # skips drawing initial weights
        model = build_model(**config["MODEL"] | {"depth": depth, "num_classes": config["MODEL"]["num_classes"] or 1000})
    with FakeTensorMode(), TensorMemory() as memory:
        _use_fake_parameters(model)
        criterion = nn.CrossEntropyLoss(label_smoothing=config["LABEL_SMOOTHING"])
        model, optimizer, engine, *_ = build_training(config, criterion, model=model)
        reduce_without_waiting(engine)
        engine.train()
        averages = EmaHook(model, config["EMA"]).averages if config["EMA"] else {}
        step = _Step(engine, memory, micro_batch, config["MODEL"]["image_size"])
        step.run(accumulation)
        parameters = list(named_shards(model).values())
        state = _nbytes(value for state in optimizer.state.values() for value in state.values())
        return StepEstimate(
            weights=_nbytes([*parameters, *averages.values()]),
            optimizer=state,
            gradients=step.gradients,
            training_peak=step.training_peak + state,  # created by the first update
            update_peak=memory.peak,
            flops=step.flops,
            calls=step.calls,
            nbytes=step.nbytes,
            data_ranks=tuple(gpc.get_ranks_in_group(ParallelMode.DATA)),
        )


def _launch_config(config: Mapping[str, Any], accumulation: int) -> dict[str, Any]:
    # DDP's options that need its own reduction, which the estimate replaces, change nothing that it counts
    unused = dict(init_sync=False, find_unused_parameters=False, static_graph=False)
    options = {"torch_ddp": {**(config.get("torch_ddp") or {}), **unused}}
    return {**config, **options, "gradient_accumulation": min(accumulation, 2)}


def _precision(fp16: Mapping[str, Any] | None, device: str) -> Mapping[str, Any] | None:
    """Say the type of mixed precision that is the device's default, which is not that of the CPU that estimates."""
    if not fp16 or fp16.get("mode") is None or device == "cpu":
        return fp16
    return {**fp16, "dtype": fp16.get("dtype") or ("float16" if is_gpu_older_than_bfloat16() else "bfloat16")}


def _use_fake_parameters(model: nn.Module) -> None:
    """Replace the parameters of a model on the meta device."""
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            setattr(layer, name, nn.Parameter(torch.empty(parameter.shape), parameter.requires_grad))


class _Step:
    """Run and count an optimizer step of an engine."""

    def __init__(self, engine: Engine, memory: TensorMemory, micro_batch: int, image_size: int) -> None:
        self.engine, self.memory, self.micro_batch, self.image_size = engine, memory, micro_batch, image_size
        self.flops, self.calls, self.nbytes = 0, Counter(), Counter()

    def run(self, accumulation: int) -> None:
        """Count the step; all micro-batches but the last are equal, so at most two are run."""
        self.memory.restart_peak()
        if accumulation > 1:
            self._count(self._micro_batch, times=accumulation - 1)
        self._count(self._micro_batch)
        self.training_peak = self.memory.peak
        self.gradients = _nbytes(self.engine.optimizer.parameters)
        self.memory.restart_peak()
        self._count(self.engine.step)

    def _count(self, part: Callable[[], None], times: int = 1) -> None:
        with Traffic() as traffic, FlopCount() as arithmetic:
            part()
        self.flops += times * arithmetic.total
        for total, counted in ((self.calls, traffic.calls), (self.nbytes, traffic.nbytes)):
            total.update({route: times * count for route, count in counted.items()})

    def _micro_batch(self) -> None:
        self.engine.zero_grad()
        images = torch.empty(self.micro_batch, 3, self.image_size, self.image_size)
        labels = torch.zeros(self.micro_batch, dtype=torch.long)
        self.engine.backward(self.engine.criterion(self.engine(images), labels))  # pyright: ignore[reportOptionalCall]


@contextmanager
def _choosing_as_on(device: str) -> Iterator[None]:
    """Make device-dependent code behave as on ``device``: attention, LAMB (``is_cpu``) and dropout's mask.

    Fake tensors cannot be on "cuda" themselves, because autograd asks the driver for the device.
    """
    if device == "cpu":
        yield
        return
    with mock.patch.object(Tensor, "is_cpu", False), mock.patch.object(F, "dropout", _dropout_by_mask):
        yield


def _dropout_by_mask(x: Tensor, p: float, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, training)[0] if training and p else x


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
