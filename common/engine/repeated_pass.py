"""REPLAY_EVERY: a micro-batch and an update computed twice, which have to be equal to the bit."""

import os
import platform
from collections.abc import Callable, Iterator
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
    """Compute the first micro-batch and the update of every ``every``-th step twice more.

    Two passes over the micro-batch before the step begin with the same weights, batch and random
    numbers, two updates before the step's with the same weights, gradients and optimizer state.
    They leave nothing behind. Checksums are compared on each rank: those of the gradients before
    data-parallel ranks average them, and those of the updated weights and state. All ranks raise
    `AgreedError` if more than ``tolerated`` checks have found a difference.

    On a GPU both use deterministic kernels. `AgreedError` names an operation without one.
    """

    def __init__(self, every: int, tolerated: int):
        self.every = every
        self.tolerated = tolerated
        self.steps = 0  # of this process
        self.is_due = False  # in the present step
        self.differing = 0  # checks
        # cuBLAS reads it with its first product; without it products on streams are refused.
        if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            set_variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def check(self, engine: Any, inputs: Any, label: Any) -> None:
        """Check the step that begins with this micro-batch, if it is due; all ranks call it."""
        self.steps += 1
        step = engine.optimizer.counter.updates + 1
        self.is_due = self.steps == FIRST or (self.steps > FIRST and step % self.every == 0)
        if self.is_due:
            compute = partial(_sum_gradients, engine, inputs, label)
            self._compare(engine, "passes", "gradients", compute)

    def check_update(self, engine: Any) -> None:
        """Check the update that follows, if the step is due; all ranks call it."""
        if self.is_due:
            self._compare(engine, "updates", "tensors", partial(_sum_update, engine))

    def _compare(self, engine: Any, what: str, parts: str, compute: Callable[[], Tensor]) -> None:
        """Call ``compute`` twice, which returns a row of checksums for each part; compare them."""
        if engine.graphs:  # autograd would remember another stream, on which nothing is recorded
            compute = partial(engine.graphs.on_stream, compute)
        with _deterministic(engine.device):
            sums_P2, again_P2 = compute(), compute()
        count = (sums_P2 != again_P2).any(1).sum().item()  # waits for the device
        mine = f"rank {gpc.get_global_rank()} ({platform.node()}, {_name_device(engine.device)})"
        ranks = gather(f"{mine}: {count} of {len(sums_P2)} {parts}" if count else "")
        if any(ranks):
            step = engine.optimizer.counter.updates + 1
            self._report(step, what, [rank for rank in ranks if rank])

    def _report(self, step: int, what: str, ranks: list[str]) -> None:
        """Say which ranks have found a difference, in how many of their tensors."""
        self.differing += 1
        text = (
            f"step {step:,}: two {what} from the same state differ on {list_some(ranks)}; "
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


def _sum_update(engine: Any) -> Tensor:
    """Return the checksums [P, 2] of this rank's updated weights and state; change nothing.

    The update has the gradients as they are: of float16 scaled, under tensor parallelism in part.
    """
    optimizer = engine.optimizer
    collect_gradients(optimizer.parameters)
    state = optimizer.optim.state
    entries = {parameter: dict(entry) for parameter, entry in state.items()}
    values = [value for entry in entries.values() for value in entry.values()]
    states = [value for value in values if isinstance(value, Tensor)]
    updated = [tensor.detach() for tensor in (*optimizer.parameters, *states)]
    gradients = [parameter.grad for parameter in optimizer.parameters]
    changed = updated + [grad for grad in gradients if grad is not None]
    # On the host, as for a checkpoint: a GPU's memory may be full.
    before = [tensor.to("cpu", copy=True) for tensor in changed]
    optimizer.step_unless(torch.zeros((), device=engine.device))
    sums_P2 = torch.stack([_sum_bits(tensor) for tensor in updated])
    for tensor, value in zip(changed, before, strict=True):
        tensor.copy_(value)
    state.clear()
    state.update(entries)
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
