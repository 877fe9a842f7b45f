"""REPLAY_EVERY: a micro-batch computed twice, whose gradients have to be equal to the bit."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.engine.collectives import gather
from common.engine.groups import generator_states, set_generator_states
from common.engine.upstream import gpc
from common.engine.zero import collect_gradients
from common.errors import AgreedError
from common.launchers import is_first_process
from common.process import set_variable
from common.text import first_line, list_some, print_wrapped

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
FIRST = 2  # the step of this process that is checked too: DDP prepares itself in the first


class RepeatedPass:
    """Compute the first micro-batch of every ``every``-th step twice more, before the step.

    Both passes begin with the same weights, batch and random numbers, and leave nothing behind.
    Checksums of the gradients are compared on each rank, before data-parallel ranks average them.
    All ranks raise `AgreedError` if more than ``tolerated`` checks have found a difference.

    On a GPU the passes use deterministic kernels. `AgreedError` names an operation without one.
    """

    def __init__(self, every: int, tolerated: int):
        self.every = every
        self.tolerated = tolerated
        self.steps = 0  # of this process
        self.differing = 0  # checks
        # cuBLAS reads it with its first product; without it products on streams are refused.
        if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            set_variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def check(self, engine: Any, inputs: Any, label: Any) -> None:
        """Check the step that begins with this micro-batch, if it is due; all ranks call it."""
        self.steps += 1
        step = engine.optimizer.counter.updates + 1
        if self.steps != FIRST and (step % self.every or self.steps < FIRST):
            return
        compute = partial(_sum_gradients, engine, inputs, label)
        if engine.graphs:  # autograd would remember another stream, on which nothing is recorded
            compute = partial(engine.graphs.on_stream, compute)
        with _deterministic(engine.device):
            sums_P2, again_P2 = compute(), compute()
        differing = (sums_P2 != again_P2).any(1).tolist()  # waits for the device
        mine = f"rank {gpc.get_global_rank()} ({platform.node()}, {_name_device(engine.device)})"
        found = [rank for rank in gather(any(differing) and (mine, sum(differing))) if rank]
        if found:
            self._report(step, len(differing), dict(found))

    def _report(self, step: int, gradients: int, ranks: dict[str, int]) -> None:
        """Say which ranks have found a difference, in how many of their gradients."""
        self.differing += 1
        counts = [f"{rank}: {count} of {gradients} gradients" for rank, count in ranks.items()]
        text = (
            f"step {step:,}: two passes from the same state differ on {list_some(counts)}; "
            "hardware or driver compute wrongly there: test it, or leave it out"
        )
        if self.differing > self.tolerated:
            raise AgreedError(f"{text} (MAX_REPLAY_FAULTS={self.tolerated})")
        if is_first_process():
            print_wrapped(f"warning: {text}", is_warning=True)


def _name_device(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # as nvidia-smi -L has it


def _sum_gradients(engine: Any, inputs: Any, label: Any) -> Tensor:
    """Return the checksums [P, 2] of this rank's gradients of a micro-batch; change nothing."""
    optimizer = engine.optimizer
    model = engine.model
    on_phase = engine.on_phase
    random = generator_states()
    buffers = [buffer.clone() for buffer in model.buffers()]  # statistics of batch norms
    # A recorded step writes to the memory of its gradients.
    recorded = [parameter.grad for parameter in optimizer.parameters] if engine.graphs else []
    optimizer.zero_grad()
    engine.on_phase = lambda phase: None
    # Past DDP, whose ranks would average. FSDP's reduce: otherwise it would keep full gradients.
    engine._model = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer.accumulated = optimizer.accumulation - 1
    output = engine.schedule._call_engine(engine, inputs)
    optimizer.backward(engine.schedule._call_engine_criterion(engine, output, label))
    collect_gradients(optimizer.parameters)
    trained = [parameter.grad for parameter in optimizer.parameters if parameter.grad is not None]
    sums_P2 = torch.stack([_sum_bits(grad) for grad in trained])
    optimizer.accumulated = 0
    optimizer.zero_grad()
    engine._model = model
    engine.on_phase = on_phase
    if engine.noise_scale:
        engine.noise_scale.norms.clear()
        engine.noise_scale.parts.clear()
    for parameter, grad in zip(optimizer.parameters, recorded, strict=False):
        parameter.grad = grad
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    set_generator_states(random)
    return sums_P2


def _sum_bits(tensor: Tensor) -> Tensor:
    """Return two sums of the bits, as integers: a plain one, and one weighted by the row."""
    bits = tensor.view(INTEGERS[tensor.itemsize])
    rows = bits.flatten(1).sum(1) if bits.dim() > 1 else bits.flatten().long()
    weights = torch.arange(1, len(rows) + 1, device=rows.device)
    return torch.stack([rows.sum(), (rows * weights).sum()])


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Let a GPU compute with deterministic kernels; `UserError` for an operation without one."""
    if device.type == "cpu":  # all are
        yield
        return
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise AgreedError(f"REPLAY_EVERY: {first_line(error)} Set REPLAY_EVERY=0") from error
    finally:
        torch.set_deterministic_debug_mode(before)
