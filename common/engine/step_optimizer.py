"""One weight update from the gradients of several micro-batches, skipped if they are not finite."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.engine.host_copy import HostCopy
from common.engine.tensor_parallel.sharding import (
    global_grad_norm,
    grad_norms,
    sum_partial_gradients,
)
from common.engine.upstream import OptimizerWrapper
from common.engine.zero import collect_gradients
from common.errors import AgreedError, UserError

MAX_SKIPPED = 20  # consecutive updates
CHECK_EVERY = 20  # updates between two copies of a GPU's counters; each is read at the next


class SkipCounter:
    """Count skipped updates on ``device``: total skipped, current streak, longest streak.

    ``clean`` counts the updates of this process before the first skipped one.
    """

    def __init__(self, device: torch.device):
        self.every = 1 if device.type == "cpu" else CHECK_EVERY
        self.updates = self.start = 0
        self.counts = torch.zeros(4, dtype=torch.int64, device=device)
        self.total, self.streak, self.longest, self.clean = self.counts.unbind()
        self.copy: HostCopy | None = None

    def count(self, skipped: Tensor) -> None:
        """Count one update; ``skipped`` is a 0-dim tensor, 1 if it was skipped and 0 if not."""
        # All on the device: the host does not wait for it. In place: a recorded step replays this.
        skipped = skipped.long()
        self.total += skipped
        self.streak += 1
        self.streak *= skipped
        self.longest.clamp_(min=self.streak)
        self.clean += self.longest == 0

    def check(self) -> list[int] | None:
        """Count an update on the host; return the counters, None between two checks.

        On a GPU each check has the counters of the one before, for which it does not wait.
        """
        self.updates += 1
        if self.updates % self.every:
            return None
        before, self.copy = self.copy, HostCopy(self.counts)
        seen = self.copy if self.copy.is_ready else before
        return seen and seen.read().tolist()

    def state_dict(self) -> dict[str, int]:
        return {
            "updates": self.updates,
            "skipped": int(self.total.item()),
            "skipped_in_a_row": int(self.streak.item()),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.updates = self.start = state["updates"]
        self.total.fill_(state["skipped"])
        # An earlier, longer streak has not ended the run: it need not be saved.
        self.streak.fill_(state["skipped_in_a_row"])
        self.longest.copy_(self.streak)


class OncePerStep:
    """A schedule whose `step` acts once per optimizer step, if called for every micro-batch."""

    def __init__(self, lr_schedule: LRScheduler, optimizer: "StepOptimizer"):
        self.lr_schedule = lr_schedule
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lr_schedule, name)

    def step(self, *args: Any) -> None:
        # `count_update` sets `accumulated` back to 0. After the other micro-batches it is above 0.
        if self.optimizer.accumulated == 0:
            self.lr_schedule.step(*args)


class StepOptimizer(OptimizerWrapper):
    """Accumulate gradients over ``accumulation`` micro-batches; then unscale, clip and update once.

    `Engine.train_step` shows the order. A script's own loop calls `zero_grad`, `backward` and
    `step` for every micro-batch, as upstream; all but `backward` act once per optimizer step.
    Afterwards ``grad_norm`` is the norm of the full gradient before clipping, a 0-dim tensor on the
    device.

    If a loss or a gradient of any rank is not finite, all ranks skip the update. This needs no
    extra communication: a non-finite loss makes the gradient non-finite, and with it the global
    norm, which is equal on all ranks. The host does not wait for the device if the optimizer reads
    ``found_inf`` there (LAMB, torch's fused optimizers). More than ``max_skipped`` consecutive
    skipped updates raise `AgreedError`. Running statistics of batch norms that a forward pass has
    made infinite or NaN keep their values.

    Replaces upstream's three wrappers, which

    - multiply all gradients by 0 when no clipping is configured (interface/optimizer.py:123),
    - clip the partial sums of each micro-batch
      (legacy/engine/gradient_accumulation/_gradient_accumulation.py:65 defines
      ``clip_grad_norm``, but the engine calls ``clip_grad_by_norm``), and
    - clip before unscaling (legacy/amp/torch_amp/torch_amp.py:51, by the same mistake).
    """

    def __init__(
        self, optim: Optimizer, accumulation: int, scaler: GradScaler | None, max_skipped: int
    ):
        super().__init__(optim)
        self.accumulation = accumulation
        self.scaler = scaler
        self.max_skipped = max_skipped
        self.max_norm = 0.0  # the greatest gradient norm; 0 for no clipping
        self.accumulated = 0  # micro-batches of the current step so far
        self.grad_norm = torch.tensor(torch.nan)
        self.norms: dict[Tensor, Tensor] = {}  # of each parameter's gradient, before clipping
        self.known_skipped = 0  # updates that the host knows to be skipped
        # Called when that grows, on all ranks after the same update, with the number of the first
        # update that this process has skipped.
        self.on_skipped: Callable[[int], object] = lambda first: None
        # Else the host decides, and waits for what it needs to know.
        self.skips_on_device: bool = getattr(optim, "_step_supports_amp_scaling", False)
        self.counter = SkipCounter(self.parameters[0].device)
        self.rates = torch.empty(0, device=self.parameters[0].device)
        self.has_device_rates = True  # whether the optimizer reads `rates`, or its groups' numbers
        self.statistics: list[Tensor] = []  # the batch norms' running statistics, flat

    @property
    def skipped(self) -> int:
        """The number of skipped updates; reading it waits for the device."""
        return int(self.counter.total.item())

    def zero_grad(self) -> None:
        if self.accumulated == 0:
            self.optim.zero_grad()
            # An overflow in a forward pass of the step may spoil them.
            if self.statistics:
                self.before = torch.cat(self.statistics)

    def backward(self, loss: Tensor) -> None:
        loss = loss / self.accumulation + self._poison(loss)
        # Small gradients would be 0 in float16 without a scale.
        super().backward(self.scaler.scale(loss) if self.scaler else loss)
        self.accumulated += 1

    def _poison(self, loss: Tensor) -> Tensor:
        """Return 0 with gradient 0; for a non-finite ``loss``, NaN with NaN in a weight's gradient.

        A non-finite loss may have a finite gradient: cross-entropy without a label is NaN, its
        gradient 0. A rank to which ``zero`` leaves no trained element cannot tell the others.
        """
        factor = torch.where(loss.detach().isfinite(), 0.0, torch.nan)
        # The smallest parameter is the cheapest. With ``zero`` a rank's shard may have no element.
        smallest = min(self.parameters, key=lambda parameter: parameter.numel() or math.inf)
        return factor * smallest.flatten()[:1].sum()

    def sum_gradients(self) -> None:
        """Collect ZeRO's shards, and sum what tensor-parallel ranks have in part."""
        collect_gradients(self.parameters)
        sum_partial_gradients(self.parameters)

    def unscale_gradients(self) -> None:
        """Divide the gradients by the loss scale, if there is one."""
        if self.scaler:
            self.scaler.unscale_(self.optim)

    def clip_gradients(self) -> None:
        """Set ``grad_norm``; scale the gradients down to ``max_norm`` if that is above 0."""
        self.norms = grad_norms(self.parameters)
        self.grad_norm = global_grad_norm(self.norms)
        if self.max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.max_norm, self.grad_norm)

    def load_rates(self) -> None:
        """Copy the learning rates of the groups to the device, where `update` reads them.

        There, as a number of the host a recorded update would keep it. In float32, which torch's
        kernels take.
        """
        rates = torch.tensor([float(group["lr"]) for group in self.param_groups])
        if len(rates) != len(self.rates):  # at first, or after `add_param_group`
            self.rates = torch.zeros_like(rates, device=self.rates.device)
        if self.rates.device.type == "cuda":
            rates = rates.pin_memory()
        self.rates.copy_(rates, non_blocking=True)

    def update(self) -> None:
        """Update the weights, or skip the update if ``grad_norm`` is not finite.

        `load_rates` comes before it, `count_update` after: this part may be a replay.
        """
        found_inf = (~self.grad_norm.isfinite()).float()  # stays on the device: no wait
        self.step_unless(found_inf)
        if self.statistics:
            self._restore_statistics()
        if self.scaler:
            # Unscaling finds only this rank's overflows, but the scale must be equal on all ranks.
            for found in self.scaler._found_inf_per_device(self.optim).values():
                found.copy_(found_inf)
            self.scaler.update()
        self.counter.count(found_inf)

    def count_update(self) -> None:
        """Count an update on the host; raise `AgreedError` if too many in a row were skipped."""
        self.accumulated = 0
        counts = self.counter.check()
        if counts is None:
            return
        self.note_skipped(counts)
        _, _, longest, _ = counts
        if longest > self.max_skipped:
            scale = ""
            if self.scaler:
                scale = f"; the float16 loss scale is down to {self.scaler.get_scale():.1e}"
            raise AgreedError(
                f"by step {self.counter.updates}, {self.counter.longest.item()} consecutive "
                "updates were skipped because the loss or a gradient was not finite "
                f"(MAX_SKIPPED={self.max_skipped}){scale}: lower LEARNING_RATE, raise "
                "WARMUP_EPOCHS, set clip_grad_norm, or use bfloat16 instead of float16"
            )

    def note_skipped(self, counts: list[int]) -> None:
        """Call `on_skipped` if by the counters more updates were skipped than the host knew."""
        total, *_, clean = counts
        if total > self.known_skipped:
            self.known_skipped = total
            self.on_skipped(self.counter.start + clean + 1)

    def step_unless(self, found_inf: Tensor) -> None:
        """Step the optimizer unless ``found_inf`` is 1, on the device where the optimizer can."""
        if self.skips_on_device:
            # GradScaler.step would use this rank's overflows only.
            self.optim.found_inf = found_inf
            with self._rates_on_device() if self.has_device_rates else nullcontext():
                self.optim.step()
            del self.optim.found_inf
        # The optimizer cannot skip on the device: the host has to wait for the answer.
        elif not found_inf.item():
            self.optim.step()
        else:
            # Schedules count skipped updates too; torch would warn where the first is skipped.
            self.optim._opt_called = True

    @contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """Give the groups their rates on the device; schedules and checkpoints see numbers."""
        saved = [dict(group) for group in self.param_groups]
        on_gpu = self.rates.device.type == "cuda"
        recorded = on_gpu and torch.cuda.is_current_stream_capturing()
        for group, rate in zip(self.param_groups, self.rates.unbind(), strict=True):
            group["lr"] = rate
            # torch refuses to record Adam without it, and warns of it where nothing is recorded.
            if recorded and "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, values in zip(self.param_groups, saved, strict=True):
                group.update(values)

    def _restore_statistics(self) -> None:
        """Put back the running statistics of batch norms that are not finite now."""
        now = torch.cat(self.statistics)
        kept = torch.where(now.isfinite(), now, self.before)
        torch._foreach_copy_(self.statistics, kept.split([len(part) for part in self.statistics]))

    def clip_grad_by_norm(self, max_norm: float) -> None:
        """Let `step` clip to ``max_norm``; upstream's ``engine.step`` calls this before it."""
        self.max_norm = max_norm

    def step(self) -> None:
        """Finish the gradient and update in a script's own loop, after the last micro-batch."""
        if self.accumulated == 0:
            raise UserError(
                "step() has no gradient: call engine.backward(loss) before, not loss.backward()"
            )
        if self.accumulated == self.accumulation:
            self.sum_gradients()
            self.unscale_gradients()
            self.clip_gradients()
            self.load_rates()
            self.update()
            self.count_update()

    def step_state(self) -> dict[str, Any]:
        """Return the JSON state of a checkpoint beside the optimizer's; waits for the device."""
        scaler = self.scaler.state_dict() if self.scaler else None
        return self.counter.state_dict() | {"scaler": scaler}

    def load_step_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `step_state`; the loss scale only if both runs have one."""
        self.counter.load_state_dict(state)
        self.known_skipped = state["skipped"]
        if self.scaler and state["scaler"]:
            # The options, such as the growth interval, are this run's.
            saved = {key: state["scaler"][key] for key in ("scale", "_growth_tracker")}
            self.scaler.load_state_dict(self.scaler.state_dict() | saved)
